"""Tables that shops' programs export, with their own columns, times and numbers."""
