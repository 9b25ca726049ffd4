"""Expressions of the Common Expression Language over the properties of items: filters and boosts."""
