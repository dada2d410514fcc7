"""The HTTP face: the Tinker and OpenAI APIs over one control plane."""
