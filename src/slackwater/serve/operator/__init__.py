"""What an operator asks for: status, metrics, instances."""
