"""Two unlike models in one process on one device: a service's, and a rollout's that borrows it."""
