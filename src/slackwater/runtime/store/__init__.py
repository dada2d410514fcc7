"""Durable state: the database, its logs and the state directory."""
