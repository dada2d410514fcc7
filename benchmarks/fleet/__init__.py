"""Benches of a whole fleet: several nodes that are killed, frozen and cut off."""
