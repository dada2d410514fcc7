"""Ways to confine an action: a plain process, bubblewrap, a container."""
