"""What tests and benchmarks share: fleets of real processes, floors, network namespaces."""
