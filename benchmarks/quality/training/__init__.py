"""Comparisons of trainings: quality, speed and memory by settings, and resumption after kills."""
