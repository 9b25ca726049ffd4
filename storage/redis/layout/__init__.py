"""The layout of a store's keys and values in Redis."""
