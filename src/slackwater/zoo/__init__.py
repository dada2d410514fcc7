"""Model directories that need no model hub: made from a seed, or taken out of a Python package."""
