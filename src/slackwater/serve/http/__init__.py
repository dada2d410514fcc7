"""The HTTP server, who may call it and how much."""
