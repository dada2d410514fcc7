"""The co-scheduler: which jobs share which nodes, and whose phase runs there next."""
