"""What simulations are told: scenario files, job tables, public traces."""
