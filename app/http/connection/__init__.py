"""What lies between the HTTP protocol and a connection: TLS, how connections are shared, and how they close."""
