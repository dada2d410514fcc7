"""Runs actions: environments, limits, processes, and what confines them."""
