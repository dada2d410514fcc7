"""The engine on CUDA: bfloat16, Triton kernels, decode steps as captured graphs."""
