"""How good recommendations are, and that what is served equals what was evaluated."""
