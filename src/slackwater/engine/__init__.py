"""The embedded LLM engine, synchronous: paged KV, prefix cache, continuous batching, sampling."""
