"""Interactions and items for training, and the splits of interactions."""
