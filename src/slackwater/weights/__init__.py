"""Weight versions: published atomically by a trainer, pulled by samplers."""
