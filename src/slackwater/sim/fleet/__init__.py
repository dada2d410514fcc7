"""One simulated fleet under the complete fleet controller: turns, operations, phases and loans."""
