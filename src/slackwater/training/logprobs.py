"""Log-probs of targets from hidden states, without keeping a whole batch's logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_BUDGET = 1 << 24  # logits alive at a time: 64 MB in fp32


def target_logprobs(
    hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor], vocab_size: int
) -> Tensor:
    """log p(targets[n, k] | hidden[n]) in fp32, in row chunks whose logits are recomputed for backward."""
    rows = max(LOGITS_BUDGET // vocab_size, 1)
    if hidden.shape[0] <= rows:
        return _of_rows(hidden, targets, logits)
    if not torch.is_grad_enabled():
        pairs = zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        return torch.cat([_of_rows(h, t, logits) for h, t in pairs])
    return torch.cat(
        [
            checkpoint(_of_rows, h, t, logits, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(torch.split(hidden, rows), torch.split(targets, rows), strict=True)
        ]
    )


def _of_rows(hidden: Tensor, targets: Tensor, logits: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _GatheredLogprobs.apply(logits(hidden).float(), targets)  # type: ignore[no-untyped-call]
    return result


class _GatheredLogprobs(torch.autograd.Function):
    """logits[n, targets[n, k]] - logsumexp(logits[n]); one vocabulary-wide temporary in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        normaliser = torch.logsumexp(logits, dim=1, keepdim=True)
        ctx.save_for_backward(logits, targets, normaliser)
        return logits.gather(1, targets) - normaliser

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, targets, normaliser = ctx.saved_tensors
        result = (logits - normaliser).exp_().mul_(-gradient.sum(dim=1, keepdim=True))
        return result.scatter_add_(1, targets, gradient), None
