"""Interactions and items as training reads them, and their splits."""
