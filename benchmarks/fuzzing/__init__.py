"""Malformed and generated requests to a running service."""
