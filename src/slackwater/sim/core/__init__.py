"""What every simulation runs on: the event queue in virtual time."""
