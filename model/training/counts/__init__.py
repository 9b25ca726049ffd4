"""Counts of training events that complement the model: pairs of items, and purchases."""
