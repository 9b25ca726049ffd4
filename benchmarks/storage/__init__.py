"""The cost of appends, folds and memory in the stores, and checks of exactly-once storage."""
