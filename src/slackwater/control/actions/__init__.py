"""The action broker: who gets which external resource, one action at a time."""
