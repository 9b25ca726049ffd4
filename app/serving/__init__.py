"""Serving models: loading, switching, experiments, and the lifespan of a tenant's service."""
