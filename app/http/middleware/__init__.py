"""ASGI middleware, and the requests that bypass it."""
