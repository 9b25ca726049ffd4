"""What happens when an event is posted: appending, counting, learning."""
