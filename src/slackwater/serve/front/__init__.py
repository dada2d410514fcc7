"""Front ends: processes that speak HTTP, and the channel between them and the control plane."""
