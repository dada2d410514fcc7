"""What changed between two versions of a tensor, to the bit.

The format: docs/reference/delta-format.md.
"""
