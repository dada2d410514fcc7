"""External jobs under permits: decorators, the job, and its client (WEAVE 5.1)."""
