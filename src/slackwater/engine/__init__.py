"""The embedded LLM engine: paged KV on a page arena, prefix cache, continuous batching, sampling.

Synchronous and without sockets: `Engine.add`, `Engine.step`, `Engine.abort`. Its process is
`worker/`'s. What differs between the CPU and CUDA is behind `Executor`.
"""
