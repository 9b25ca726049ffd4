"""Shared parts of the benchmarks: services, servers, clients and faults in separate processes."""
