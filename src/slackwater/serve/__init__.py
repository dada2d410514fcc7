"""The HTTP API: the Tinker and OpenAI APIs over one control plane."""
