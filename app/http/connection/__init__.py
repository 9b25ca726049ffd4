"""What lies between the HTTP protocol and a connection: TLS, and how it closes."""
