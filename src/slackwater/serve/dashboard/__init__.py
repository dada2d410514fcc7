"""The dashboard: the fleet, its jobs and the planner in a browser, live or from a recorded run."""
