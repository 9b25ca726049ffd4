"""A user's state: its bytes, and the fold of events into it."""
