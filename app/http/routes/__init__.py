"""The endpoints, one resource a module."""
