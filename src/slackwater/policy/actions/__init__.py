"""Which actions start, and with how much of what."""
