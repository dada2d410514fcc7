"""The event queue in virtual time, which every simulation uses."""
