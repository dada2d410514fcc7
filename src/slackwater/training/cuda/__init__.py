"""Training on CUDA below fp32: Triton kernels, and flash attention over shared prefixes."""
