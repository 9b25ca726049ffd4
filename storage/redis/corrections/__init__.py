"""Corrections of which events count for which user: undo, merge, erasure and repair."""
