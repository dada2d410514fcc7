"""The simulated body of the rollout manager: engines, providers and a trainer, in virtual time."""
