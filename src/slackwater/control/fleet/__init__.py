"""The fleet controller: every controller of turns, weights, steps, jobs and phases as one."""
