"""API keys, their scopes and their rate limits."""
