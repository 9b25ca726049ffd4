"""Corrections of the events that count for a user: undo, merge, erasure and repair."""
