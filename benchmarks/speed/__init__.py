"""The cost of a private step."""
