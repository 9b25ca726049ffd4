"""The log of a Redis store: in Redis and, where it was trimmed, in the archive."""
