"""The keys and values of a store in Redis."""
