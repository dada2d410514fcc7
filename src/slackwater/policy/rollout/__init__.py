"""Where turns go, which move, and when training nodes roll out themselves."""
