"""The items of a generation: what was trained, what the API overrides, and the two merged."""
