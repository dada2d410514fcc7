"""Whose phase runs next."""
