"""The live body: sockets, processes, timers and the durable store. It decides nothing."""
