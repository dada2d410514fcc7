"""Versions on their way: published in buckets, seen when complete, pulled by whoever needs them, at
their own time.
"""
