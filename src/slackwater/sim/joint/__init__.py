"""One simulated fleet under all controllers: phases, turns and versions in one event queue."""
