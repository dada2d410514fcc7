"""Order and lifecycle of training operations, and of the sessions that own them."""
