"""One definition of the Llama, Qwen2 and Qwen3 causal language models, for sampling and training.

The engine and the trainer share it: what differs between them (attention over pages or over a
packed batch, plain or fused arithmetic, adapters by row) is passed in.
"""
