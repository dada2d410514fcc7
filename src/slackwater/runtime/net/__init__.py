"""Connections to workers, and tasks beside the loop."""
