"""Items, properties and statistics of tenants in the embedded store."""
