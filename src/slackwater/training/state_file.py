"""A trainer's complete state as one checked tensor file in a folder, replaced by one rename.

Tensors: `weight.*`, `moment1.*`, `moment2.*`, and `gradient.*` if a pass was accumulated since the
last step. `meta`: the net, the source of its frozen part, and the counters.

A trainer on several ranks writes one such file per rank, with the slices that this rank publishes
(`weight.model.norm.weight[0:64]`): no element is written twice, and any layout can read them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraSpec
from slackwater.tensors.checked_file import read_tensors, write_tensors
from slackwater.tensors.header import read_header
from slackwater.weights.plan.layout import Layout
from slackwater.weights.plan.shard_map import RankShards
from slackwater.weights.plan.transfer import PublishedSlice, plan_fetches

FILE_NAME = "trainer.safetensors"
_SHARD_FILE = "trainer-{:05d}-of-{:05d}.safetensors"
_KIND = "slackwater trainer state 2"
_FIRST_KIND = "slackwater trainer state 1"  # its base sum was another function, and is ignored


@dataclass(frozen=True, slots=True)
class TrainerMeta:
    """A trainer's state without its tensors.

    `seed` determines the base's weights if `source` is None; `lora.seed` determines the adapter's
    first factors. Nothing random happens after creation, so no generator's state is saved. `dtype`
    is what the net computes in; the tensors of a state are always fp32. `base_sum` is None if it is
    unknown.
    """

    net: Mapping[str, Any]
    source: str | None
    seed: int
    dtype: str
    lora: LoraSpec | None
    base_sum: int | None
    optimizer_steps: int = 0
    accumulated_passes: int = 0
    trained_tokens: int = 0

    @property
    def net_config(self) -> NetConfig:
        return NetConfig.from_hf(self.net)

    def to_json(self) -> dict[str, Any]:
        return {"kind": _KIND, **asdict(self)}


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A state in memory: `tensors["weight"]["model.norm.weight"]`, and so on."""

    meta: TrainerMeta
    tensors: Mapping[str, Mapping[str, Tensor]]


def write_state(directory: Path, state: TrainerState) -> None:
    """Replace the folder's state by this one, atomically."""
    flat = {
        f"{part}.{name}": tensor
        for part, tensors in state.tensors.items()
        for name, tensor in tensors.items()
    }
    write_tensors(directory / FILE_NAME, flat, state.meta.to_json())


def write_shard(
    directory: Path, meta: TrainerMeta, tensors: Mapping[str, Tensor], ranks: Layout, rank: int
) -> None:
    """Replace one rank's file of the folder's state; the tensors' names are those of slices."""
    shard = {"layout": str(ranks), "rank": rank, "ranks": ranks.ranks}
    path = directory / _SHARD_FILE.format(rank + 1, ranks.ranks)
    write_tensors(path, tensors, {**meta.to_json(), "shard": shard})


def drop_other_layouts(directory: Path, ranks: int) -> None:
    """Delete older files, except those of the state that this many ranks have just written."""
    keep = {_SHARD_FILE.format(rank + 1, ranks) for rank in range(ranks)}
    for path in directory.glob("trainer*.safetensors"):
        if path.name not in keep:
            path.unlink()


def read_meta(directory: Path) -> TrainerMeta:
    """The folder's state without its tensors."""
    return _meta(directory, read_header(_files(directory)[0]).meta)


def read_state(directory: Path, receiver: RankShards | None = None) -> TrainerState:
    """The folder's state, or a rank's part of it; refused if a checksum does not match.

    Files are read one after the other: a rank has at most one of them in memory beside its own
    part.
    """
    files = _files(directory)
    tensors: dict[str, dict[str, Tensor]] = {}
    metas: list[TrainerMeta] = []
    missing: dict[str, int] = {}
    for path in files:
        flat, header = read_tensors(path)
        metas.append(_meta(directory, header.meta))
        for full_name, tensor in flat.items():
            part, name = full_name.split(".", 1)
            if receiver is None:
                tensors.setdefault(part, {})[name] = tensor
                continue
            if part not in tensors:
                tensors[part] = {name: torch.empty(s) for name, s in receiver.shapes.items()}
                missing[part] = sum(piece.box.elements for piece in receiver.pieces)
            missing[part] -= _copy(tensors[part], name, tensor, receiver)
    if any(meta != metas[0] for meta in metas):
        raise ConfigError.of("trainer state", str(directory), "has files of different saves")
    for part, elements in missing.items():
        if elements:
            raise ConfigError.of(f"state's {part}", str(directory), f"lacks {elements} elements")
    return TrainerState(metas[0], tensors)


def is_sharded(directory: Path) -> bool:
    """Whether several ranks wrote the folder's state."""
    return len(_files(directory)) > 1


def _copy(own: dict[str, Tensor], name: str, tensor: Tensor, receiver: RankShards) -> int:
    """Copy a rank's part out of a tensor or a slice of one; the number of elements."""
    source = PublishedSlice.from_name(name, tensor.shape)
    copied = 0
    for fetch in plan_fetches([source], receiver):
        own[source.tensor][fetch.place] = tensor[fetch.box.index_in(source.box)]
        copied += fetch.box.elements
    return copied


def _files(directory: Path) -> list[Path]:
    """The file of a state, or the files of its ranks."""
    path = directory / FILE_NAME
    if path.is_file():
        return [path]
    found = sorted(directory.glob("trainer-*-of-*.safetensors"))
    if not found:
        raise NotFoundError(f"trainer state: {str(directory)!r} holds no {FILE_NAME}")
    ranks = int(found[0].stem.rpartition("-")[2])
    expected = [directory / _SHARD_FILE.format(rank + 1, ranks) for rank in range(ranks)]
    for path in expected:
        if path not in found:
            raise NotFoundError(f"trainer state: {str(directory)!r} holds no {path.name}")
    return expected


def _meta(directory: Path, found: Mapping[str, Any]) -> TrainerMeta:
    kind = found.get("kind")
    if kind not in (_KIND, _FIRST_KIND):
        raise ConfigError.of("trainer state", str(directory), f"must be of kind {_KIND!r}")
    lora = found["lora"]
    other_keys = ("kind", "lora", "base_crc32", "shard")
    fields = {key: value for key, value in found.items() if key not in other_keys}
    if kind == _FIRST_KIND:
        fields["base_sum"] = None
    return TrainerMeta(**fields, lora=None if lora is None else LoraSpec(**lora))
