"""Inputs of simulations: scenario files, job tables and public traces."""
