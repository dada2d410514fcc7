"""Bit-exact deltas between two versions of a tensor: docs/reference/delta-format.md."""
