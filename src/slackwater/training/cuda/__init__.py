"""Training on CUDA below fp32: Triton kernels for the small arithmetic, flash attention over shared
prefixes.
"""
