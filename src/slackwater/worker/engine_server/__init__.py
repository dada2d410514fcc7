"""A vLLM or SGLang server as a rollout instance."""
