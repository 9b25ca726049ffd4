"""The cost of requests, and the throughput of a service."""
