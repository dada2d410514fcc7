"""An hour of mixed load, and what it leaves behind."""
