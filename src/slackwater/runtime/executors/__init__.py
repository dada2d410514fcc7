"""Executors: the fleet controller's commands become I/O, what comes back becomes events."""
