"""The embedded trainer: passes, losses, steps and saved state of one model. Synchronous, no
sockets.
"""
