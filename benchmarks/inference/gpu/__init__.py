"""What runs on a GPU, measured in one visit: correctness first, then speed."""
