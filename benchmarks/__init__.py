"""Measurements and fault injection; no part of the service."""
