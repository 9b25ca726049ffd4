"""The endpoints, one resource per module."""
