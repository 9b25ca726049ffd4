"""HTTP: protocol, middleware, authentication, routes and error responses."""
