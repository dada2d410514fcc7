"""Serving clusters in virtual time, with rollouts on their devices."""
