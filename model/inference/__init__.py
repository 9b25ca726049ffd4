"""From states to the top k items: the step, the scan, and what surrounds them."""
