"""Who decides when: controllers. Events go in with their time, commands come out; no I/O."""
