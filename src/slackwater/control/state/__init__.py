"""The book of a node's states: which tier each is on, who waits for it, what moves."""
