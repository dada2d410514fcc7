"""The action broker in virtual time: workloads, workers, baselines and storms."""
