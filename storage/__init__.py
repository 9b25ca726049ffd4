"""User states and the event log, as numpy arrays and bytes. This package uses no tensors, and neither app nor model."""
