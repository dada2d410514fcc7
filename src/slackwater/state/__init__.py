"""A node's state manager: device, host and disk tiers, moves between them, checkpoints."""
