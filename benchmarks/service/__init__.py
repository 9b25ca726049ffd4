"""The cost of requests, and how many of them a service answers."""
