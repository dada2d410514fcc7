"""Rollout rules compared in virtual time: one scenario, a result per rule."""
