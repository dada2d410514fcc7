"""Log-probs of targets from hidden states, without keeping a whole batch's logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slackwater.nets.tensor_parallel import TensorParallel

LOGITS_BUDGET = {"cpu": 1 << 26, "cuda": 1 << 32}  # bytes of logits alive at a time
Logits = Callable[[Tensor], Tensor]
Gather = Callable[[Tensor, Tensor, Tensor], Tensor]


def target_logprobs(
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    logits: Logits,
    vocab_size: int,
    parallel: TensorParallel | None,
) -> Tensor:
    """`[M, K]` in fp32: log p(targets[m, k] | hidden[rows[m]]). Several m may use one row.

    Rows are processed in chunks; if there is more than one, backward computes their logits again.
    With `parallel`, each rank has the logits of its part of the vocabulary.
    """
    gather: Gather = _gather
    if parallel is not None:
        gather = _VocabularyParallelGather(parallel, vocab_size)
        vocab_size = -(-vocab_size // parallel.size)
    wide = 4 if hidden.device.type == "cpu" else hidden.dtype.itemsize
    chunk = max(LOGITS_BUDGET[hidden.device.type] // (wide * vocab_size), 1)
    if hidden.shape[0] <= chunk:
        return gather(logits(hidden), rows, targets)
    order = torch.argsort(rows, stable=True)
    rows, targets = rows[order], targets[order]
    starts = torch.arange(0, hidden.shape[0] + chunk, chunk, device=rows.device)
    edges = torch.searchsorted(rows, starts).tolist()
    parts = []
    for number, part in enumerate(torch.split(hidden, chunk)):
        selected = slice(edges[number], edges[number + 1])
        arguments = (part, rows[selected] - number * chunk, targets[selected], logits, gather)
        if torch.is_grad_enabled():
            parts.append(
                checkpoint(
                    _chunk_logprobs, *arguments, use_reentrant=False, preserve_rng_state=False
                )
            )
        else:
            parts.append(_chunk_logprobs(*arguments))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return torch.cat(parts).index_select(0, inverse)


def _chunk_logprobs(
    hidden: Tensor, rows: Tensor, targets: Tensor, logits: Logits, gather: Gather
) -> Tensor:
    return gather(logits(hidden), rows, targets)


def _gather(scores: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
    if scores.is_cuda and scores.dtype != torch.float32:
        from slackwater.training.cuda.logprobs import gathered_logprobs  # late: needs Triton

        found: Tensor = gathered_logprobs(scores, rows, targets)
        return found
    result: Tensor = _gather_logprobs(scores.float(), rows, targets)
    return result


class _GatheredLogprobs(torch.autograd.Function):
    """logits[row, target] - logsumexp(logits[row]); one vocabulary-wide temporary in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        normaliser = torch.logsumexp(logits, dim=1)
        places = rows[:, None] * logits.shape[1] + targets
        ctx.save_for_backward(logits, normaliser, rows, places)
        return logits.reshape(-1)[places] - normaliser[rows][:, None]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logits, normaliser, rows, places = ctx.saved_tensors
        per_row = torch.zeros_like(normaliser).index_add_(0, rows, g.sum(dim=1))
        result = (logits - normaliser[:, None]).exp_().mul_(-per_row[:, None])
        result.view(-1).index_add_(0, places.flatten(), g.reshape(-1))
        return result, None, None


_gather_logprobs: Any = _GatheredLogprobs.apply


class _VocabularyParallelGather:
    """Log-probs when each rank has the logits of its own part of the vocabulary."""

    def __init__(self, parallel: TensorParallel, vocab_size: int) -> None:
        self._parallel = parallel
        self._first, self._stop = parallel.vocabulary(vocab_size)

    def __call__(self, scores: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        scores, parallel = scores.float(), self._parallel
        peak = parallel.max_over_ranks(scores.detach().amax(dim=1))
        total = parallel.sum(torch.exp(scores - peak[:, None]).sum(dim=1))
        here = (targets >= self._first) & (targets < self._stop)
        places = torch.where(here, targets - self._first, 0)
        own = scores[rows[:, None], places] * here
        return parallel.sum(own) - (peak + torch.log(total))[rows][:, None]
