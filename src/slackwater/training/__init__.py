"""The embedded trainer: passes, losses, steps and saved state. Synchronous, no sockets."""
