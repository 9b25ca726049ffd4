"""How models are trained: with which threads, and by which settings."""
