"""A plan for a known set of jobs, found by the real co-scheduler and measured in virtual time."""
