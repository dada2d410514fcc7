"""Running actions: environments, their limits, the processes in them, and what holds those
together.
"""
