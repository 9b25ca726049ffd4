"""What wraps every request."""
