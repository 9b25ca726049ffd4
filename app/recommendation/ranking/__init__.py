"""Ranks items for users from their stored states, without any input or output."""
