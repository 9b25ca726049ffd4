"""Which models are served: loading, switching, experiments, and the process around them."""
