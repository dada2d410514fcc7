"""Simulated engines, their costs, and capacity that comes and goes."""
