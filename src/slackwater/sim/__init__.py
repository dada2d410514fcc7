"""The simulators: the same controllers in virtual time, with cost models, faults and reports."""
