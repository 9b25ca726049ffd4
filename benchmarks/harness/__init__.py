"""What the benchmarks run on: services, servers, clients and faults in processes of their own."""
