"""Filters and boosts: expressions in the Common Expression Language over item properties."""
