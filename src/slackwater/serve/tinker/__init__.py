"""The Tinker API."""
