"""Algorithms, environments and recipes: ordinary API clients of the service."""
