"""Who has a serving device next: the service whose device it is, or a rollout that borrows it."""
