"""What a tenant has set of items, as far as a process has read it."""
