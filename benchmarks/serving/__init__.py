"""Measurements of serving devices that lend."""
