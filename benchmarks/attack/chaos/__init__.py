"""Random concurrent faults, followed by a comparison of all logs and states with the acknowledged operations."""
