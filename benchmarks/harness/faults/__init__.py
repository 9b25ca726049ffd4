"""Faults that benchmarks inject: connections that are cut, and a machine whose disk, clock and network fail."""
