"""Algorithms, environments and recipes: clients of the service through its public SDK, like
anybody's.
"""
