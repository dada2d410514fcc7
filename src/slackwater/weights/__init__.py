"""Weight versions: published whole by a trainer, pulled by whoever samples with them."""
