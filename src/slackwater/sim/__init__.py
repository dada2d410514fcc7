"""The simulated body: an event queue in virtual time, cost models, faults, reports."""
