"""Which jobs share which nodes."""
