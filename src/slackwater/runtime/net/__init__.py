"""Connections of workers, the depot, and background tasks."""
