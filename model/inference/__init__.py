"""Inference: from states to the top k items, by the step and the scan."""
