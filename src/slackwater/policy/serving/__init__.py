"""Which work a serving device does next: its own service, or a rollout that borrows it."""
