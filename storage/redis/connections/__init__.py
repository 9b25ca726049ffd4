"""Connections to Redis: to one server or to the nodes of a cluster, each behind a circuit breaker."""
