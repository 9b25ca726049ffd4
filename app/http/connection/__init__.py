"""What lies between the HTTP protocol and a connection: how it closes."""
