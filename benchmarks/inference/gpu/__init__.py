"""The benchmarks that need a GPU, in one run: correctness first, then speed."""
