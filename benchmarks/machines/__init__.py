"""Several machines: network namespaces as hosts, an Ethernet switch between them, and faults."""
