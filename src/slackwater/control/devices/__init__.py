"""Which trainer holds its devices for which order."""
