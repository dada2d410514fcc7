"""Measurements of the action broker."""
