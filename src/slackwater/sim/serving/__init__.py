"""A simulated serving cluster: its devices, requests and loans."""
