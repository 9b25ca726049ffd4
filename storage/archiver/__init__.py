"""Moving the log of a store into the archive."""
