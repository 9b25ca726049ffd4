"""Data directories: public data sets, a synthetic shop, mapped tables, and copies from a bucket."""
