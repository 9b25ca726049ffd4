"""Attempts to break the whole service, and the search for what they broke."""
