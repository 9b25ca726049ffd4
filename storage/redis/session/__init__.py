"""The session of a store with its servers: checks before the first use, and trust in the data afterwards."""
