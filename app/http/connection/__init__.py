"""What lies between the HTTP protocol and a connection: TLS, how long a connection stays, and how it closes."""
