"""The cost of scans, of attention, and of a model in memory."""
