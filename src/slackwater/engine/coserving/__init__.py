"""Two different models in one process on one device: a service's, and a borrowing rollout's."""
