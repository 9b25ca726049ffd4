"""Measurements of items that training has not seen, and of users with few events."""
