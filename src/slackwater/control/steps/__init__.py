"""The step book: who has the trainers' devices, when a step begins and ends, and what waits."""
