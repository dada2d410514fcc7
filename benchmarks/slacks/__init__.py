"""All five kinds of slack in one simulated fleet, and what each of them brings."""
