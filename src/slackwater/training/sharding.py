"""A net spread over ranks: slices for tensor parallelism, and FSDP2 over the data ranks.

No rank ever holds the whole model: parameters are created on the meta device, sharded, allocated,
and filled from one whole tensor at a time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import net_config, net_shapes, whole_tensors
from slackwater.nets.ranks import Ranks
from slackwater.training.parameters import FlatParameters, combine_sums, tensor_sum
from slackwater.weights.plan.shard_map import ShardMap, TensorSplit, parameters_of


def load_sharded_net(
    source: Path | NetConfig,
    ranks: Ranks,
    *,
    frozen: bool,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> tuple[CausalLM, int]:
    """This rank's part of a model, and the `base_sum` of the whole model."""
    config = net_config(source)
    with torch.device("meta"):
        net = CausalLM(config, ranks.tp)
    net.to(dtype).requires_grad_(not frozen)
    if ranks.layout.dp > 1:
        _shard_over_data(net, ranks)
    net.to_empty(device=device)
    net.rotary.fill(torch.device(device), dtype)
    shapes = net_shapes(config)
    plan = ShardMap(shapes, config.head_dim, ranks.layout).rank(ranks.rank)
    boxes = {piece.tensor: piece.box for piece in plan.pieces}
    own = {name: local_tensor(parameter) for name, parameter in net.named_parameters()}
    sums: dict[str, int] = {}
    for name, tensor in whole_tensors(source, shapes, seed=seed, dtype=dtype, device=device):
        if name in boxes:  # a small tensor may have no row for every data rank
            own[name].detach().copy_(tensor[tuple(map(slice, boxes[name].start, boxes[name].stop))])
        if ranks.leads:
            sums[name] = tensor_sum(tensor.to(dtype))
    total = combine_sums(sums[name] for name in shapes) if ranks.leads else 0
    data = ranks.broadcast(total.to_bytes(8, "little") if ranks.leads else None)
    return net, int.from_bytes(data, "little")


def _shard_over_data(net: CausalLM, ranks: Ranks) -> None:
    """Shard over the data ranks; gradients are summed, never averaged: a loss is a sum."""
    mesh, policy = ranks.mesh["dp"], MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(net, "run_layers")
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo has no scaled sum, which a divide factor of 1 would still use.
            module.set_force_sum_reduction_for_comms(True)


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class ShardedParameters(FlatParameters):
    """One rank's part of the trained parameters, its gradient and its moments.

    FSDP owns the shards that it gathers from; this is the optimizer's copy of them. Every rank
    makes the same steps, so copies on several ranks stay equal.
    """

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._ranks = ranks
        self._shards = {
            name: parameter
            for name, parameter in parameters.items()
            if isinstance(parameter, DTensor)
        }
        own = parameters
        if self._shards:
            own = {name: local_tensor(p).detach().clone() for name, p in parameters.items()}
        super().__init__(own)
        shapes = {name: tuple(shape) for name, shape in self._shapes.items()}
        whole = {p.name for p in parameters_of(shapes) if p.cut is TensorSplit.NOT}
        self._whole = [part for name, part in self.slices.items() if name in whole]
        self._cut = [part for name, part in self.slices.items() if name not in whole]
        # Tensors that every rank has whole, but whose gradient covers only its heads or columns.
        self._partial = [
            part
            for name, part in self.slices.items()
            if name in whole and any(kind in name for kind in (".lora_", "q_norm", "k_norm"))
        ]

    def collect(self) -> None:
        """Move the gradients of FSDP's shards to the flat gradient."""
        for name, shard in self._shards.items():
            if shard.grad is not None:
                part = self.slices[name]
                self._live_gradient[part] += local_tensor(shard.grad).reshape(-1)
                shard.grad = None
        super().collect()

    def reduce_over_ranks(self) -> None:
        """Complete a pass's gradient: sum over an adapter's copies; FSDP has summed its shards."""
        ranks = self._ranks
        if not self._shards and ranks.layout.dp > 1:
            ranks.sum_over_data(self.gradient)
        if ranks.tp is not None and self._partial:
            parts = torch.cat([self.gradient[part] for part in self._partial])
            ranks.sum_over_model(parts)
            sizes = [part.stop - part.start for part in self._partial]
            for part, values in zip(self._partial, parts.split(sizes), strict=True):
                self.gradient[part] = values

    def is_finite(self) -> bool:
        return self._ranks.max_over_ranks(int(not super().is_finite())) == 0

    def _norm(self) -> float:
        """The norm over the whole model: slices are added up, replicated tensors count once."""
        cut, whole = self._squares(self._cut), self._squares(self._whole)
        if self._shards:
            self._ranks.sum_over_data(cut)
            self._ranks.sum_over_data(whole)
        return float((self._ranks.sum_over_model(cut) + whole).sqrt())

    def _squares(self, parts: Sequence[slice]) -> Tensor:
        norms = [
            torch.linalg.vector_norm(self.gradient[part], dtype=torch.float64) for part in parts
        ]
        return (
            torch.stack([self.gradient.new_zeros((), dtype=torch.float64), *norms]).square().sum()
        )

    def _refresh(self) -> None:
        super()._refresh()
        with torch.no_grad():
            for name, shard in self._shards.items():
                local = local_tensor(shard)
                local.copy_(self._live[self.slices[name]].view(local.shape))
