"""The path from a recommendation request to its answer."""
