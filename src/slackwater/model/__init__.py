"""What things are: ids, units, errors, and frozen dataclasses for jobs, pools, nodes and turns."""
