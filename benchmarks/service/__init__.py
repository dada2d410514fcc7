"""The service as its clients see it."""
