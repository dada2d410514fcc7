"""Timelines of runs: plots and Perfetto traces."""
