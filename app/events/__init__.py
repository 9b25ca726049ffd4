"""Processing posted events: appending, counting and learning."""
