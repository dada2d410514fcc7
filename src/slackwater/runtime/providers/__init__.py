"""Where instances come from: a port with a fixed list, local processes, and the replay of a spot trace."""
