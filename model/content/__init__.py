"""What items are: words of titles, categories and vectors that a shop computes, and what these tell of codes."""
