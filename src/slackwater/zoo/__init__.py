"""Model directories: created from a seed, from files in Python packages, or from a model hub."""
