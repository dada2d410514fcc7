"""One simulated fleet with all five kinds of slack, and what each of them brings."""
