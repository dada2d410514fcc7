"""Starts nodes' agents and their worker processes, or waits for agents that others start."""
