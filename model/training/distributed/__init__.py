"""One training by several processes: what each of them has of a batch, and what they tell each other."""
