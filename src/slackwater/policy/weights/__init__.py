"""Decisions about weight versions: by which route to get one, from which member, and which to
drop.
"""
