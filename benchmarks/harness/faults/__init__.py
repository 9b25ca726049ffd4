"""Faults that benchmarks inject: cut connections, and a machine whose disk, clock and network fail."""
