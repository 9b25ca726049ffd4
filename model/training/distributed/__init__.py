"""Training with several processes: their parts of a batch, and their communication."""
