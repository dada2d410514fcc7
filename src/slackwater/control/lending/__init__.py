"""Which serving nodes lend their devices to which job's rollouts."""
