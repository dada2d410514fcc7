"""Benches of the embedded trainer and of whole steps."""
