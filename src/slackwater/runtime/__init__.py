"""The live runtime: sockets, processes, timers and the durable store. It decides nothing."""
