"""A trainer's complete state as one checked tensor file in a folder, replaced by one rename.

Tensors: `weight.*`, `moment1.*`, `moment2.*`, and `gradient.*` where a pass has been accumulated
and not yet stepped. `meta`: the net, where its frozen part comes from, and the counters.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slackwater.model.errors import ConfigError, NotFoundError
from slackwater.nets.config import NetConfig
from slackwater.nets.lora import LoraSpec
from slackwater.tensors.checked_file import read_tensors, write_tensors

FILE_NAME = "trainer.safetensors"
_KIND = "slackwater trainer state 2"
_FIRST_KIND = (
    "slackwater trainer state 1"  # its sum of the base was another one, and is not looked at
)


@dataclass(frozen=True, slots=True)
class TrainerMeta:
    """All of a trainer that is not a tensor.

    `seed` is where its random numbers come from: the base's weights where `source` is None, and the
    adapter's first factors (`lora.seed`). Nothing is drawn after creation, so no generator's state
    needs keeping. `dtype` is what the net computed in; the tensors of a state are fp32 whatever it
    was. `base_sum` is None where it is not known.
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
    """A read state: `tensors["weight"]["model.norm.weight"]`, and so on."""

    meta: TrainerMeta
    tensors: Mapping[str, Mapping[str, Tensor]]


def write_state(directory: Path, state: TrainerState) -> None:
    """Replace the folder's state by this one, whole."""
    flat = {
        f"{part}.{name}": tensor
        for part, tensors in state.tensors.items()
        for name, tensor in tensors.items()
    }
    write_tensors(directory / FILE_NAME, flat, state.meta.to_json())


def read_state(directory: Path) -> TrainerState:
    """The folder's state; refused if a byte of it is not as written."""
    flat, header = read_tensors(_file(directory))
    tensors: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in flat.items():
        part, name = full_name.split(".", 1)
        tensors.setdefault(part, {})[name] = tensor
    return TrainerState(_meta(directory, header.meta), tensors)


def _file(directory: Path) -> Path:
    path = directory / FILE_NAME
    if not path.is_file():
        raise NotFoundError(f"trainer state: {str(directory)!r} holds no {FILE_NAME}")
    return path


def _meta(directory: Path, found: Mapping[str, Any]) -> TrainerMeta:
    kind = found.get("kind")
    if kind not in (_KIND, _FIRST_KIND):
        raise ConfigError.of("trainer state", str(directory), f"must be of kind {_KIND!r}")
    lora = found["lora"]
    apart = ("kind", "lora", "base_crc32")
    fields = {key: value for key, value in found.items() if key not in apart}
    if kind == _FIRST_KIND:
        fields["base_sum"] = None
    return TrainerMeta(**fields, lora=None if lora is None else LoraSpec(**lora))
