"""The states of one node: the tier of each, who waits for it, and what moves."""
