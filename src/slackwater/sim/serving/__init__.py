"""A serving cluster in virtual time: its devices, its requests, and what it lends."""
