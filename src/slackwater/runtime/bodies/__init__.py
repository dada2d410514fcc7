"""Live bodies: one per controller; sockets and timers become events, commands become I/O."""
