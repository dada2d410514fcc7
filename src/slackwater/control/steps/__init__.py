"""The step tracker: which trainers have the shared devices, and when a step begins and ends."""
