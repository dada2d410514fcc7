"""A vLLM server as a rollout instance."""
