"""The engine on a CPU: float32, compiled loops in a fixed order of summation."""
