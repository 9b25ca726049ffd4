"""A tenant's item overrides, as read by one process."""
