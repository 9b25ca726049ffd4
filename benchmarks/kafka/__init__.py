"""Reading and writing topics: throughput, and what kills, cuts and failures of brokers do."""
