"""File formats of tables."""
