"""The cost of requests, and the rates of a service."""
