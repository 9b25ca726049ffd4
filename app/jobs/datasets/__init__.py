"""Data directories: downloads, a synthetic shop, and how both are written."""
