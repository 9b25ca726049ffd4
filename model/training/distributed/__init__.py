"""One training by several processes: each one's part of a batch, and their communication."""
