"""Actions over HTTP: submit, await, cancel, stream; environments; limits."""
