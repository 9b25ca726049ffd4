"""Comparisons of plain requests: with another version of the code."""
