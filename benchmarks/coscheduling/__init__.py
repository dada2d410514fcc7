"""Benches of placement, ordering and the planner."""
