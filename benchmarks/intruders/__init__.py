"""Attacks on a running service by a tenant, a node and a stranger; none may succeed."""
