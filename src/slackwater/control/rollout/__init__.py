"""The rollout manager: who owns turns, where they run, and what happens when an instance leaves."""
