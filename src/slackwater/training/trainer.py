"""One model's trainable state, and the operations on it.

Every operation either succeeds completely or leaves the state unchanged: inputs are checked first,
and a pass whose result is not finite restores the gradient. From the same saved state, the same
operations in the same order give the same bits (fp32, CPU, one thread count), so a log of
operations can be replayed on a save.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.model.adam import Adam
from slackwater.model.errors import ConfigError, RefusedError
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_shapes, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec
from slackwater.nets.ranks import Ranks
from slackwater.training.datum import Datum, PassOutput, check_data
from slackwater.training.losses import find_loss
from slackwater.training.packed_pass import PackedPass
from slackwater.training.parameters import FlatParameters, base_sum
from slackwater.training.state_file import (
    TrainerMeta,
    TrainerState,
    drop_other_layouts,
    is_sharded,
    read_meta,
    read_state,
    write_shard,
    write_state,
)
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import ShardMap
from slackwater.weights.plan.transfer import plan_publishing

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """Trains all parameters if `lora` is None, otherwise an adapter of a frozen base.

    `flat` are the trained parameters with their moments; `meta` has the net, its source and the
    counters.

    With `ranks` it is one rank's part of a trainer: every rank gets the same operations in the same
    order, and returns the same results.
    """

    def __init__(self, net: CausalLM, meta: TrainerMeta, ranks: Ranks | None = None) -> None:
        self._net = net
        self.meta = meta
        self._ranks = ranks
        self._adapter: LoraAdapter | None = None
        if meta.lora is None:
            trainable: dict[str, Tensor] = dict(net.named_parameters())
        else:
            net.requires_grad_(False)
            self._adapter = LoraAdapter.create(
                meta.lora, net.config, dtype=net.dtype, device=net.device, parallel=net.parallel
            )
            trainable = self._adapter.tensors
            for factor in trainable.values():
                factor.requires_grad_(True)
        if ranks is None:
            self.flat = FlatParameters(trainable)
        else:
            from slackwater.training.sharding import ShardedParameters  # late: 1 s for DTensor

            self.flat = ShardedParameters(trainable, ranks)
        self._pass = PackedPass(net, self._adapter, ranks)

    @classmethod
    def create(
        cls,
        source: Path | NetConfig,
        lora: LoraSpec | None = None,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "cpu",
        ranks: Ranks | None = None,
    ) -> "Trainer":
        """A trainer of a model directory, or of a configuration with random weights by `seed`."""
        if dtype not in DTYPES:
            raise ConfigError.of("dtype", dtype, f"must be one of {', '.join(DTYPES)}")
        sum_of_base: int | None = None
        if ranks is None:
            net = load_net(source, dtype=DTYPES[dtype], device=device, seed=seed)
            sum_of_base = base_sum(net_tensors(net)) if lora else None
        else:
            from slackwater.training.sharding import load_sharded_net  # late: 1 s for DTensor

            kind = DTYPES[dtype]
            net, sum_of_base = load_sharded_net(
                source, ranks, frozen=lora is not None, dtype=kind, device=device, seed=seed
            )
        meta = TrainerMeta(
            net=net.config.to_hf(),
            source=None if isinstance(source, NetConfig) else str(source),
            seed=seed,
            dtype=dtype,
            lora=lora,
            base_sum=sum_of_base if lora else None,
        )
        return cls(net, meta, ranks)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        source: Path | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        ranks: Ranks | None = None,
    ) -> "Trainer":
        """The trainer that was saved there; `source` is the adapter's base, if it has moved.

        With another `dtype` than the saved one, the trainer computes in that from now on: the save
        holds fp32 masters and moments, so nothing is lost.
        """
        meta = read_meta(directory)
        base: Path | NetConfig = meta.net_config
        if meta.lora is not None and (source or meta.source):
            base = source or Path(str(meta.source))
        trainer = cls.create(base, meta.lora, meta.seed, dtype or meta.dtype, device, ranks)
        if not _same_base(meta, trainer.meta):
            raise ConfigError.of(
                "base model", str(base), "is not the one this state was trained on"
            )
        own = trainer.meta
        trainer.meta = dataclasses.replace(meta, dtype=own.dtype, base_sum=own.base_sum)
        trainer._restore(trainer._read(directory), optimizer=True)
        return trainer

    def frozen(self) -> Mapping[str, Tensor]:
        """The net's own tensors if an adapter is trained on them, otherwise nothing."""
        return {} if self._adapter is None else dict(self._net.named_parameters())

    def restore_counters(self, meta: Mapping[str, Any]) -> None:
        """Set the counters from a state whose tensors are bound already (`TrainerMeta.to_json`)."""
        self.meta = dataclasses.replace(
            self.meta,
            optimizer_steps=int(meta["optimizer_steps"]),
            accumulated_passes=int(meta["accumulated_passes"]),
            trained_tokens=int(meta["trained_tokens"]),
        )

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: Mapping[str, float],
        *,
        forward_only: bool = False,
    ) -> PassOutput:
        """Log-probs and loss of the data; unless `forward_only`, accumulate the loss's gradient."""
        loss = find_loss(loss_fn)
        settings = loss.resolve_config(loss_fn, config)
        net = self._net.config
        check_data(data, loss, net.vocab_size, net.max_positions)
        if forward_only:
            with torch.no_grad():
                return self._pass.run(data, loss, settings, self.flat.collect)
        flat = self.flat
        before = flat.gradient.clone() if self.meta.accumulated_passes else None
        try:
            if self._ranks is not None:
                flat.set_gradient(None)
            output = self._pass.run(data, loss, settings, flat.collect)
            if self._ranks is not None:
                flat.reduce_over_ranks()
                if before is not None:
                    flat.gradient += before
            if not flat.is_finite():
                raise RefusedError(f"gradient of {loss_fn} is not finite; nothing was accumulated")
        except BaseException:
            flat.set_gradient(before)
            raise
        self._add_to_counters(
            accumulated_passes=1, trained_tokens=sum(datum.num_tokens for datum in data)
        )
        return output

    def optim_step(self, adam: Adam) -> dict[str, float]:
        """Step with the accumulated gradient and clear it.

        Without an accumulated pass nothing changes, including the step count: no gradient is not
        the same as a gradient of zero.
        """
        passes = self.meta.accumulated_passes
        norm = 0.0
        if passes:
            norm = self.flat.step(adam, self.meta.optimizer_steps + 1)
            self._add_to_counters(optimizer_steps=1)
        self.discard_gradient()
        return {
            "grad_norm": norm,
            "accumulated_passes": float(passes),
            "optimizer_steps": float(self.meta.optimizer_steps),
        }

    def discard_gradient(self) -> None:
        """Forget the passes accumulated since the last step."""
        self.flat.set_gradient(None)
        self.meta = dataclasses.replace(self.meta, accumulated_passes=0)

    def weights(self) -> Mapping[str, Tensor]:
        """The weights for samplers: the adapter's or the net's. Copy them before the next step."""
        return self.flat.live()

    def gradient(self) -> Mapping[str, Tensor]:
        """The accumulated gradient by parameter, in fp32. Views."""
        return self.flat.views_by_name(self.flat.gradient)

    def save(self, directory: Path) -> None:
        """Write the complete state there: weights, moments, accumulated gradient, counters."""
        flat = self.flat
        parts = {"weight": flat.master, "moment1": flat.moment1, "moment2": flat.moment2}
        if self.meta.accumulated_passes:
            parts["gradient"] = flat.gradient
        if self._ranks is None:
            tensors = {part: flat.views_by_name(vector) for part, vector in parts.items()}
            write_state(directory, TrainerState(self.meta, tensors))
            return
        sliced = {
            f"{part}.{name}": tensor
            for part, vector in parts.items()
            for name, tensor in self._own_slices(flat.views_by_name(vector)).items()
        }
        layout = self._ranks.layout
        write_shard(directory, self.meta, sliced, layout, self._ranks.rank)
        self._ranks.wait_for_all()
        if self._ranks.leads:
            drop_other_layouts(directory, layout.ranks)

    def weight_slices(self) -> Mapping[str, Tensor]:
        """The slices of `weights` that this rank publishes. Views."""
        return self._own_slices(self.flat.live())

    def _own_slices(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The slices of this rank's tensors that no other rank writes."""
        assert self._ranks is not None
        shards, rank = self.shard_map(), self._ranks.rank
        own = shards.rank(rank)
        return {
            each.name: tensors[each.tensor][own.find(each.tensor, each.box)]
            for each in plan_publishing(shards)
            if each.rank == rank
        }

    def shard_map(self) -> ShardMap:
        """Which slices of the trained tensors each rank holds; data ranks replicate an adapter."""
        config, lora = self._net.config, self.meta.lora
        layout = Layout() if self._ranks is None else self._ranks.layout
        if lora is not None:
            layout = dataclasses.replace(layout, fsdp=False)
            return ShardMap(lora.tensor_shapes(config), config.head_dim, layout)
        return ShardMap(net_shapes(config), config.head_dim, layout)

    def _read(self, directory: Path) -> TrainerState:
        """This rank's part of the state saved there."""
        if self._ranks is None and not is_sharded(directory):
            return read_state(directory)
        rank = 0 if self._ranks is None else self._ranks.rank
        return read_state(directory, self.shard_map().rank(rank))

    def load_into(self, directory: Path, optimizer: bool) -> None:
        """Load the weights saved there and, if `optimizer`, moments, step count and gradient, which
        are otherwise reset. The saved tensors are fp32; this trainer's dtype stays.
        """
        state = self._read(directory)
        if _shape(state.meta.lora) != _shape(self.meta.lora):
            raise ConfigError.of("state's lora", state.meta.lora, f"must be {self.meta.lora} here")
        if not _same_base(state.meta, self.meta):
            raise ConfigError.of("state", str(directory), "was trained over another base model")
        for part in ("weight", "moment1", "moment2"):
            self.flat.check(state.tensors.get(part, {}))
        self._restore(state, optimizer)

    def _restore(self, state: TrainerState, optimizer: bool) -> None:
        flat = self.flat
        flat.fill(flat.master, state.tensors["weight"])
        flat.set_gradient(None)
        flat.reset_moments()
        passes = steps = 0
        if optimizer:
            flat.fill(flat.moment1, state.tensors["moment1"])
            flat.fill(flat.moment2, state.tensors["moment2"])
            steps = state.meta.optimizer_steps
            if "gradient" in state.tensors:
                flat.fill(flat.gradient, state.tensors["gradient"])
                passes = state.meta.accumulated_passes
        self.meta = dataclasses.replace(
            self.meta,
            optimizer_steps=steps,
            accumulated_passes=passes,
            trained_tokens=state.meta.trained_tokens,
        )

    def _add_to_counters(self, **added: int) -> None:
        counts = {name: getattr(self.meta, name) + number for name, number in added.items()}
        self.meta = dataclasses.replace(self.meta, **counts)


def _shape(lora: LoraSpec | None) -> LoraSpec | None:
    return None if lora is None else dataclasses.replace(lora, seed=0)


def _same_base(saved: TrainerMeta, own: TrainerMeta) -> bool:
    """Whether an adapter's state belongs to this base; a state without a sum is accepted."""
    return saved.base_sum is None or saved.base_sum == own.base_sum
