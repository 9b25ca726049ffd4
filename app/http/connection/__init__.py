"""Connections of the HTTP protocol: TLS, timeouts and closing."""
