"""Log-probs of targets from logits below fp32; backward overwrites the logits by their gradient."""

from typing import Any

import torch
import triton
from torch import Tensor

from slackwater.training.cuda.kernels import logits_backward, normaliser_kernel

_BLOCK = 4096


class _GatheredLogprobs(torch.autograd.Function):
    """logits[row, target] - logsumexp(logits[row]), in fp32; do not use the logits again."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        logits = logits.contiguous()
        count, vocab = logits.shape
        normaliser = torch.empty(count, dtype=torch.float32, device=logits.device)
        normaliser_kernel[(count,)](logits, normaliser, vocab, BLOCK=_BLOCK, num_warps=8)
        places = rows[:, None] * vocab + targets
        ctx.save_for_backward(logits, normaliser, rows, places)
        return logits.view(-1)[places].float() - normaliser[rows][:, None]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, normaliser, rows, places = ctx.saved_tensors
        count, vocab = logits.shape
        strength = torch.zeros_like(normaliser).index_add_(0, rows, g.sum(dim=1))
        grid = (count, triton.cdiv(vocab, _BLOCK))
        logits_backward[grid](logits, normaliser, strength, vocab, BLOCK=_BLOCK, num_warps=8)
        logits.view(-1).index_add_(0, places.flatten(), g.reshape(-1).to(logits.dtype))
        return logits, None, None


gathered_logprobs: Any = _GatheredLogprobs.apply
