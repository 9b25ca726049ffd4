"""Evaluation protocols, baselines and comparisons."""
