"""What a parameter of a Llama- or Qwen-style model is, by its name: how it is cut, and into what it
is fused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from slackwater.model.errors import ConfigError

Shapes = Mapping[str, tuple[int, ...]]


class TensorSplit(Enum):
    """Along what a parameter is cut by tensor parallelism."""

    NOT = "not"
    HEADS = "heads"  # rows, by query heads
    KV_HEADS = "kv heads"  # rows, by key/value heads; shared if there are fewer than ranks
    ROWS = "rows"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"  # rows, filled up


@dataclass(frozen=True, slots=True)
class Parameter:
    """`fused` is the tensor that it is part of on a fused rank, at `order` among its parts;
    `expert` its expert.
    """

    name: str
    shape: tuple[int, ...]
    cut: TensorSplit
    layer: int | None
    expert: int | None = None
    fused: str | None = None
    order: int = 0

    @property
    def first_stage(self) -> bool:
        """Whether it stands before the layers."""
        return self.layer is None and "embed_tokens" in self.name


_LAYER = re.compile(r"^(?P<before>.*\blayers\.(?P<layer>\d+)\.)(?P<rest>.+)$")
_EXPERT = re.compile(r"^(?P<before>.*\bexperts\.)(?P<expert>\d+)\.(?P<rest>.+)$")
# The end of a name within its layer: how it is cut, the fused tensor's name, its order there.
_IN_LAYER: tuple[tuple[str, TensorSplit, str | None, int], ...] = (
    (r"(.*)\bq_proj\.(weight|bias)", TensorSplit.HEADS, r"\1qkv_proj.\2", 0),
    (r"(.*)\bk_proj\.(weight|bias)", TensorSplit.KV_HEADS, r"\1qkv_proj.\2", 1),
    (r"(.*)\bv_proj\.(weight|bias)", TensorSplit.KV_HEADS, r"\1qkv_proj.\2", 2),
    (r".*\bo_proj\.weight", TensorSplit.COLUMNS, None, 0),
    (r"(.*)\bgate_proj\.(weight|bias)", TensorSplit.ROWS, r"\1gate_up_proj.\2", 0),
    (r"(.*)\bup_proj\.(weight|bias)", TensorSplit.ROWS, r"\1gate_up_proj.\2", 1),
    (r".*\bdown_proj\.weight", TensorSplit.COLUMNS, None, 0),
    (r"(.*)\bw1\.weight", TensorSplit.ROWS, r"\1w13.weight", 0),
    (r"(.*)\bw3\.weight", TensorSplit.ROWS, r"\1w13.weight", 1),
    (r".*\bw2\.weight", TensorSplit.COLUMNS, None, 0),
    (r".*\b(o_proj|down_proj)\.bias", TensorSplit.NOT, None, 0),
    # An adapter's factor is cut where its layer is; the other factor is whole on every rank.
    (r".*\bq_proj\.lora_B\.weight", TensorSplit.HEADS, None, 0),
    (r".*\b[kv]_proj\.lora_B\.weight", TensorSplit.KV_HEADS, None, 0),
    (r".*\b(gate|up)_proj\.lora_B\.weight", TensorSplit.ROWS, None, 0),
    (r".*\b(o|down)_proj\.lora_A\.weight", TensorSplit.COLUMNS, None, 0),
    (r".*_proj\.lora_[AB]\.weight", TensorSplit.NOT, None, 0),
    (r".*norm\d*\.(weight|bias)", TensorSplit.NOT, None, 0),
    (r".*\b(gate|router|shared_expert_gate)\.(weight|bias)", TensorSplit.NOT, None, 0),
)


def parameters_of(shapes: Shapes) -> tuple[Parameter, ...]:
    """Every parameter of a model, from its names and shapes; an unknown name is refused."""
    return tuple(_parameter(name, tuple(shape)) for name, shape in sorted(shapes.items()))


def _parameter(name: str, shape: tuple[int, ...]) -> Parameter:
    in_layer = _LAYER.match(name)
    if in_layer is None:
        if re.search(r"\b(embed_tokens|lm_head|lm_head\.lora_B)\.weight$", name):
            return Parameter(name, shape, TensorSplit.VOCABULARY, None)
        if re.search(r"(norm\.(weight|bias)|lm_head\.lora_A\.weight)$", name):
            return Parameter(name, shape, TensorSplit.NOT, None)
        raise _unknown(name)
    layer, rest, before = int(in_layer["layer"]), in_layer["rest"], in_layer["before"]
    expert: int | None = None
    in_expert = _EXPERT.match(rest)
    if in_expert is not None:
        expert, rest = int(in_expert["expert"]), in_expert["rest"]
        before += in_expert["before"]
    for pattern, cut, fused, order in _IN_LAYER:
        found = re.fullmatch(pattern, rest)
        if found is None:
            continue
        joined = found.expand(fused) if fused is not None else None
        if joined is None and expert is not None:
            joined = rest  # a layer's experts are stacked
        whole = None if joined is None else before + joined
        return Parameter(name, shape, cut, layer, expert, whole, order)
    raise _unknown(name)


def _unknown(name: str) -> ConfigError:
    return ConfigError.of("parameter", name, "is not of a Llama- or Qwen-style model")
