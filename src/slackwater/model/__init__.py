"""The data model: ids, units, errors, and frozen dataclasses of jobs, pools, nodes and turns."""
