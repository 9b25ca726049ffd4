"""The cost of appends, folds and memory in the stores."""
