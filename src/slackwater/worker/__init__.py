"""Process mains: plain synchronous loops that take commands, do them, and report."""
