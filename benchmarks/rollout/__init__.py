"""Benches of the rollout manager, simulated and live."""
