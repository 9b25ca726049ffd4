"""Faults under load, and what must survive them."""
