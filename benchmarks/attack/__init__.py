"""Attempts to break or overload the whole service."""
