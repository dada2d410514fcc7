"""The simulated fleet under the co-scheduler: scenarios, cost models, workloads, reports."""
