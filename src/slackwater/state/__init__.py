"""A node's state manager: device, host and disk tiers and moves between them."""
