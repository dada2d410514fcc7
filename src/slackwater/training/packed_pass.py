"""One pass over data of many lengths: packed micro-batches, each forward and optionally backward.

Sequences are packed end to end without padding, in the given order, so that samples of one prompt
are neighbours and share its rows. The plan depends only on the costs and the budget: a replayed
pass adds the same numbers in the same order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slackwater.model.errors import RefusedError
from slackwater.nets.causal_lm import Attention, CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraAdapter
from slackwater.nets.ops import NetOps
from slackwater.nets.ranks import Ranks
from slackwater.training.datum import Datum, PassOutput
from slackwater.training.fused_ops import FusedOps
from slackwater.training.logprobs import target_logprobs
from slackwater.training.losses import Loss
from slackwater.training.shared_attention import (
    SharedPrefixAttention,
    SharedRows,
    common_with_previous,
    share_prefixes,
)

ACTIVATION_BYTES = 1 << 29  # activations of one micro-batch on a CPU
_SHARE_OF_DEVICE = 6  # on a GPU: a sixth of its memory
_FEW_TOKENS = 2048  # if a GPU cannot keep the activations of so many, it recomputes each layer

Floats = npt.NDArray[np.float32]


def divide_among_ranks(
    alone: Sequence[int], after_previous: Sequence[int], ranks: int
) -> list[range]:
    """Divide the sequences into contiguous shares, one per rank, and minimize the largest share.

    Costs are those of `pack`: a sequence is cheaper behind one with the same prefix, so the samples
    of a prompt stay together unless dividing them reduces the largest share.
    """
    low, high = max(alone), sum(alone)
    while low < high:
        middle = (low + high) // 2
        if len(pack(alone, after_previous, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    shares = [range(part[0], part[-1] + 1) for part in pack(alone, after_previous, low)]
    return shares + [range(len(alone), len(alone))] * (ranks - len(shares))


def gather_outputs(
    ranks: Ranks, sizes: Sequence[tuple[int, ...]], own: Sequence[Floats | None], loss: float
) -> tuple[list[Floats], float]:
    """Gather every datum's log-probs, in the caller's order, and the total loss on every rank.

    `own` has None for the data of other ranks; each datum is on exactly one data rank.
    """
    numbers = [int(np.prod(size)) for size in sizes]
    together = torch.zeros(sum(numbers))
    for part, held in zip(together.split(numbers), own, strict=True):
        if held is not None:
            part.copy_(torch.from_numpy(held.reshape(-1)))
    ranks.sum_over_data(together)
    total = ranks.sum_over_data(torch.tensor([loss], dtype=torch.float64))
    parts = zip(together.split(numbers), sizes, strict=True)
    return [part.numpy().reshape(size) for part, size in parts], float(total)


def pack(alone: Sequence[int], after_previous: Sequence[int], budget: int) -> list[list[int]]:
    """Indices by micro-batch, filled in order; a sequence above the budget is a micro-batch alone.

    A sequence costs `alone[i]` as the first of a micro-batch, and `after_previous[i]` behind its
    predecessor.
    """
    batches: list[list[int]] = []
    room = 0
    for index, (whole, further) in enumerate(zip(alone, after_previous, strict=True)):
        if batches and further <= room:
            batches[-1].append(index)
            room -= further
        else:
            batches.append([index])
            room = budget - whole
    return batches


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The size of a micro-batch, by the net's shape and dtype and the device's memory only, so that
    replays pack alike. Keys are copied for a sequence that attends to them: `keys_per_token` take
    the memory of one token's activations.
    """

    tokens: int
    keys_per_token: int
    recompute: bool

    @classmethod
    def for_torch_ops(
        cls, net: NetConfig, element_bytes: int, device_bytes: int = 0
    ) -> "MicroBatch":
        """For PyTorch's operators, on a GPU with so much memory or on a CPU."""
        heads = net.num_heads * net.head_dim
        per_layer = 10 * net.hidden_size + 5 * heads + 5 * net.ffn_size
        tokens, recompute = _fit_tokens(net, element_bytes, device_bytes, per_layer, beside=0)
        return cls(tokens, per_layer // (2 * heads), recompute)

    @classmethod
    def for_cuda_kernels(
        cls, net: NetConfig, element_bytes: int, device_bytes: int
    ) -> "MicroBatch":
        """For the CUDA kernels, which keep fewer activations and copy no keys."""
        heads, kv_heads = net.num_heads * net.head_dim, net.num_kv_heads * net.head_dim
        per_layer = 4 * net.hidden_size + 3 * heads + 3 * kv_heads + 3 * net.ffn_size
        tokens, recompute = _fit_tokens(
            net, element_bytes, device_bytes, per_layer, beside=net.vocab_size
        )
        return cls(tokens, 1 << 30, recompute)

    def plan(self, sequences: Sequence[npt.NDArray[np.int64]]) -> list[list[int]]:
        return pack(*self.costs(sequences), self.tokens)

    def costs(self, sequences: Sequence[npt.NDArray[np.int64]]) -> tuple[list[int], list[int]]:
        """The cost of each sequence alone and behind its predecessor: rows added, keys copied."""
        keys = [-(-len(sequence) // self.keys_per_token) for sequence in sequences]
        alone = [len(sequence) + copied for sequence, copied in zip(sequences, keys, strict=True)]
        shared = common_with_previous(sequences)
        return alone, [whole - common for whole, common in zip(alone, shared, strict=True)]


def _fit_tokens(
    net: NetConfig, element_bytes: int, device_bytes: int, per_layer: int, *, beside: int
) -> tuple[int, bool]:
    """How many tokens fit, and whether layers must be recomputed for that. A token keeps
    `per_layer` elements in each layer and others `beside` them.
    """
    room = device_bytes // _SHARE_OF_DEVICE if device_bytes else ACTIVATION_BYTES
    kept = net.num_layers * per_layer + beside
    recompute = device_bytes > 0 and room // (element_bytes * kept) < _FEW_TOKENS
    if recompute:
        kept = 2 * net.num_layers * net.hidden_size + per_layer + beside
    return max(256, min(16384, room // (element_bytes * kept))), recompute


class PackedPass:
    """Runs data through a net, with an adapter if given; with `ranks`, this rank's share."""

    def __init__(
        self, net: CausalLM, adapter: LoraAdapter | None, ranks: Ranks | None = None
    ) -> None:
        self._net = net
        self._adapter = adapter
        self._ranks = ranks
        fused = net.device.type == "cpu" and net.dtype == torch.float32
        self._ops: NetOps = FusedOps() if fused else net.plain_ops
        self._attention: Callable[[SharedRows, torch.device], Attention] = SharedPrefixAttention
        if net.device.type != "cuda":
            self._micro_batch = MicroBatch.for_torch_ops(net.config, net.dtype.itemsize)
            return
        memory = torch.cuda.get_device_properties(net.device).total_memory
        if net.dtype == torch.float32 or net.config.head_dim % 8 or net.config.head_dim > 256:
            self._micro_batch = MicroBatch.for_torch_ops(net.config, net.dtype.itemsize, memory)
            return
        from slackwater.training.cuda.attention import FlashSharedAttention  # late: needs Triton
        from slackwater.training.cuda.ops import CudaOps

        self._ops, self._attention = CudaOps(), FlashSharedAttention
        self._micro_batch = MicroBatch.for_cuda_kernels(net.config, net.dtype.itemsize, memory)

    def run(
        self,
        data: Sequence[Datum],
        loss: Loss,
        config: Mapping[str, float],
        collect: Callable[[], None],
    ) -> PassOutput:
        """Checked data in, log-probs and metrics out; `collect` is called after each backward."""
        logprobs: list[npt.NDArray[np.float32] | None] = [None] * len(data)
        total = 0.0
        for indices, batch in self._micro_batches(data, loss):
            with torch.set_grad_enabled(torch.is_grad_enabled() and _has_gradient(batch[0], loss)):
                lp = self._logprobs(batch)
                value = self._loss(batch, lp, loss, config) if indices else 0 * lp.sum()
            if self._ranks is None and not torch.isfinite(value):
                raise _loss_not_finite_error()
            if value.requires_grad:
                torch.autograd.backward(value)
                collect()
            total += value.item()
            if indices:
                for index, part in zip(indices, _split(lp, batch), strict=True):
                    logprobs[index] = part
        if self._ranks is not None:
            shapes = [datum.inputs["target_tokens"].shape for datum in data]
            logprobs[:], total = gather_outputs(self._ranks, shapes, logprobs, total)
            if not math.isfinite(total):  # not earlier: the other ranks wait in the collectives
                raise _loss_not_finite_error()
        done = tuple(part for part in logprobs if part is not None)
        tokens = float(sum(datum.num_tokens for datum in data))
        return PassOutput(done, {"loss:sum": total, "num_tokens:sum": tokens})

    def _micro_batches(
        self, data: Sequence[Datum], loss: Loss
    ) -> list[tuple[list[int], list[Datum]]]:
        """Micro-batches of one target width each; data without a gradient are separate.

        Ranks must run equally many, because of the collectives in them: a rank with fewer adds
        micro-batches without indices.
        """
        by_kind: dict[tuple[int, bool], list[int]] = {}
        for index, datum in enumerate(data):
            by_kind.setdefault((_width(datum), _has_gradient(datum, loss)), []).append(index)
        found: list[tuple[list[int], list[Datum]]] = []
        for _, members in sorted(by_kind.items()):
            slots, fillers = self._own_share([data[index].tokens for index in members])
            planned = [[members[slot] for slot in batch] for batch in slots]
            found += [(indices, [data[index] for index in indices]) for indices in planned]
            found += [([], [_first_token(data[members[0]])])] * fillers
        return found

    def _own_share(self, sequences: Sequence[npt.NDArray[np.int64]]) -> tuple[list[list[int]], int]:
        """This rank's micro-batches, and how many fewer they are than those of the busiest rank."""
        if self._ranks is None or self._ranks.layout.dp == 1:
            return self._micro_batch.plan(sequences), 0
        shares = divide_among_ranks(*self._micro_batch.costs(sequences), self._ranks.layout.dp)
        plans = [
            [
                [share.start + slot for slot in batch]
                for batch in self._micro_batch.plan(sequences[share.start : share.stop])
            ]
            for share in shares
        ]
        own = plans[self._ranks.dp_rank]
        return own, max(map(len, plans)) - len(own)

    def _logprobs(self, batch: Sequence[Datum]) -> Tensor:
        shared, device = share_prefixes([datum.tokens for datum in batch]), self._net.device
        hidden = self._net.run_layers(
            torch.from_numpy(shared.tokens).to(device),
            torch.from_numpy(shared.positions).to(device),
            self._attention(shared, device),
            adapter=self._adapter,
            ops=self._ops,
            recompute=self._micro_batch.recompute and torch.is_grad_enabled(),
        )
        rows = self._gather(shared.rows)
        targets = self._gather([datum.inputs["target_tokens"] for datum in batch])
        return target_logprobs(
            hidden,
            rows,
            targets.view(len(rows), -1),
            self._logits,
            self._net.config.vocab_size,
            self._net.parallel,
        ).view(targets.shape)

    def _loss(
        self, batch: Sequence[Datum], lp: Tensor, loss: Loss, config: Mapping[str, float]
    ) -> Tensor:
        inputs = {
            name: self._gather([datum.inputs[name] for datum in batch]) for name in loss.inputs
        }
        if loss.by_sequence:
            lengths = [datum.num_tokens for datum in batch]
            inputs["sequence"] = self._gather([np.repeat(np.arange(len(batch)), lengths)])
        return loss.value(lp, inputs, config).sum()

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._net.logits(hidden, adapter=self._adapter, ops=self._ops)

    def _gather(self, parts: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(self._net.device)


def _loss_not_finite_error() -> RefusedError:
    return RefusedError("loss is not finite: logprobs and the model are too far apart")


def _first_token(datum: Datum) -> Datum:
    return Datum(datum.tokens[:1], {name: values[:1] for name, values in datum.inputs.items()})


def _width(datum: Datum) -> int:
    targets = datum.inputs["target_tokens"]
    return 0 if targets.ndim == 1 else int(targets.shape[1])


def _has_gradient(datum: Datum, loss: Loss) -> bool:
    """Whether its gradient can be non-zero; groups of equal rewards need no backward pass."""
    return loss.scaled_by is None or bool(np.any(datum.inputs[loss.scaled_by]))


def _split(lp: Tensor, batch: Sequence[Datum]) -> list[npt.NDArray[np.float32]]:
    host = lp.detach().cpu().numpy()
    return np.split(host, np.cumsum([datum.num_tokens for datum in batch])[:-1])
