"""Connections to the servers of Redis: one or a cluster's, each behind a circuit breaker."""
