"""Messages between the control plane and its workers, and their codec."""
