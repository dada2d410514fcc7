"""Actions over HTTP: submit, await, cancel, stream; environments; tools for agents."""
