"""The service: HTTP, settings, use cases, command line. The only package that imports the other two."""
