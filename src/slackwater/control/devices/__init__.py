"""Device allocation: which deployment owns which devices."""
