"""What a forkserver does once, so that no rank that it forks does it again.

Sharded tensors import PyTorch's compiler and the first pass loads compiled kernels: seconds of
processor time, which on a busy machine were most of a run. Only a forward pass: a process that has
computed gradients cannot be forked.
"""

import torch
import torch._dynamo

from harness import rank_worker as rank_worker
from harness.rank_training import batch, create
from slackwater.training import sharding as sharding

torch.set_num_threads(1)
for kind in ("full", "lora"):
    create(kind).forward_backward(batch(0), "importance_sampling", {}, forward_only=True)
