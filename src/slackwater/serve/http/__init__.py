"""The HTTP server: authentication, limits, errors."""
