"""Operator endpoints: status, metrics, instances, jobs."""
