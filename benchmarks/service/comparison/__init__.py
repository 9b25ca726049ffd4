"""Comparisons of plain requests: with another version of the code, and with what a user would otherwise write."""
