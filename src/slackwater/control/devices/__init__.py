"""Which deployment owns which devices, and which trainer holds its own for which order."""
