"""Benches of the embedded engine."""
