"""Which job's phase runs next."""
