"""What the HTTP face asks for: sampling, sessions, instances, outcomes."""
