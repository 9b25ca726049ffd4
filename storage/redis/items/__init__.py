"""Items, properties and statistics of tenants in Redis."""
