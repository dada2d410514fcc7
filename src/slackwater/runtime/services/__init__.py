"""Services behind the HTTP API: sampling, sessions, instances, actions, outcomes."""
