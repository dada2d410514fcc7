"""Starting worker processes, and following those that others start."""
