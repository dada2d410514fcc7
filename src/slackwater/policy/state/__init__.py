"""Where state lives: how it is laid out, what is evicted, what is brought up early."""
