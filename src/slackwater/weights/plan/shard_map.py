"""Which slices of a model each rank of a layout holds (ROSE 4.2, shard-aware routing).

Slices are in the coordinates of the whole model, so any two layouts can exchange them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from slackwater.model.errors import ConfigError
from slackwater.weights.plan.layout import Layout

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements from `start` up to, not including, `stop`, in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def clip(self, dim: int, start: int, stop: int) -> "Box":
        """The part of this box between two indices of one dimension; it may be empty."""
        starts, stops = list(self.start), list(self.stop)
        starts[dim] = max(starts[dim], start)
        stops[dim] = max(min(stops[dim], stop), starts[dim])
        return Box(tuple(starts), tuple(stops))

    def intersection(self, other: "Box") -> "Box | None":
        """The part that both hold, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def index_in(self, other: "Box") -> tuple[slice, ...]:
        """This box as an index into the array that holds `other`."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.start, self.stop, other.start, strict=True)
        )


class TensorSplit(Enum):
    """The units by which tensor parallelism splits a parameter."""

    NOT = "not"
    HEADS = "heads"  # rows, by query heads
    KV_HEADS = "kv heads"  # rows, by key/value heads; shared if there are fewer than ranks
    ROWS = "rows"
    COLUMNS = "columns"
    VOCABULARY = "vocabulary"  # rows; the last rank has fewer


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    cut: TensorSplit


# Patterns for the end of a parameter's name, and how it is split.
_IN_LAYER: tuple[tuple[str, TensorSplit], ...] = (
    (r"q_proj\.(weight|bias)", TensorSplit.HEADS),
    (r"[kv]_proj\.(weight|bias)", TensorSplit.KV_HEADS),
    (r"(gate|up)_proj\.(weight|bias)", TensorSplit.ROWS),
    (r"(o|down)_proj\.weight", TensorSplit.COLUMNS),
    (r"(o|down)_proj\.bias", TensorSplit.NOT),
    # One factor of an adapter is split like its layer; the other is whole on every rank.
    (r"q_proj\.lora_B\.weight", TensorSplit.HEADS),
    (r"[kv]_proj\.lora_B\.weight", TensorSplit.KV_HEADS),
    (r"(gate|up)_proj\.lora_B\.weight", TensorSplit.ROWS),
    (r"(o|down)_proj\.lora_A\.weight", TensorSplit.COLUMNS),
    (r"\w+_proj\.lora_[AB]\.weight", TensorSplit.NOT),
    (r"\w*norm\d*\.(weight|bias)", TensorSplit.NOT),
)
_OUTSIDE: tuple[tuple[str, TensorSplit], ...] = (
    (r"(embed_tokens|lm_head|lm_head\.lora_B)\.weight", TensorSplit.VOCABULARY),
    (r"(\w*norm\.(weight|bias)|lm_head\.lora_A\.weight)", TensorSplit.NOT),
)


def parameters_of(shapes: Shapes) -> tuple[Parameter, ...]:
    """Every parameter of a model; an unknown name is refused."""
    return tuple(
        Parameter(name, tuple(shape), _cut(name)) for name, shape in sorted(shapes.items())
    )


def _cut(name: str) -> TensorSplit:
    for end, cut in _IN_LAYER if re.search(r"\blayers\.\d+\.", name) else _OUTSIDE:
        if re.search(rf"(^|\.){end}$", name):
            return cut
    raise ConfigError.of("parameter", name, "is not of a Llama- or Qwen-style model")


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """The rank's tensor of that name is the slice `box` of the model's tensor."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class RankShards:
    """One rank's tensors: their shapes, and which slices of the model they are."""

    shapes: Shapes
    pieces: tuple[ShardPiece, ...]

    @classmethod
    def whole(cls, shapes: Shapes) -> "RankShards":
        """The shards of a single rank: the whole model."""
        return cls(shapes, tuple(ShardPiece(name, Box.whole(s)) for name, s in shapes.items()))

    def find(self, tensor: str, box: Box) -> tuple[slice, ...]:
        """The index of a slice of the model in the rank's tensor."""
        for piece in self.pieces:
            if piece.tensor == tensor and piece.box.intersection(box) == box:
                return box.index_in(piece.box)
        raise KeyError(f"{tensor} {box}")


class ShardMap:
    """The slices of every rank of one model under one layout. `head_dim` is an attention head's
    size.
    """

    def __init__(self, shapes: Shapes, head_dim: int, layout: Layout) -> None:
        self.layout = layout
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._parameters = parameters_of(shapes)
        self._head_dim = head_dim

    def rank(self, rank: int) -> RankShards:
        tp_rank, dp_rank = self.layout.position(rank)
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: list[ShardPiece] = []
        for parameter in self._parameters:
            box = self._cut(parameter, tp_rank)
            if self.layout.fsdp and self.layout.dp > 1:
                box = self._share_rows(box, dp_rank)
            shapes[parameter.name] = box.shape
            if box.elements:
                pieces.append(ShardPiece(parameter.name, box))
        return RankShards(shapes, tuple(pieces))

    def _cut(self, parameter: Parameter, tp_rank: int) -> Box:
        """The rank's slice of a parameter."""
        whole, tp = Box.whole(parameter.shape), self.layout.tp
        if parameter.cut is TensorSplit.NOT:
            return whole
        if parameter.cut is TensorSplit.VOCABULARY:
            rows = parameter.shape[0]
            each = -(-rows // tp)
            first = min(tp_rank * each, rows)
            return whole.clip(0, first, min(first + each, rows))
        dim = 1 if parameter.cut is TensorSplit.COLUMNS else 0
        units, width = parameter.shape[dim], 1
        if parameter.cut in (TensorSplit.HEADS, TensorSplit.KV_HEADS):
            units, width = units // self._head_dim, self._head_dim
        if parameter.cut is TensorSplit.KV_HEADS and units < tp:
            if tp % units:
                raise ConfigError.of("layout tp", tp, f"must be a multiple of {units} kv heads")
            first, last = tp_rank * units // tp, tp_rank * units // tp + 1
        elif units % tp:
            raise ConfigError.of(
                "layout tp", tp, f"must divide {units} {parameter.cut.value} of {parameter.name}"
            )
        else:
            first, last = tp_rank * units // tp, (tp_rank + 1) * units // tp
        return whole.clip(dim, first * width, last * width)

    def _share_rows(self, box: Box, dp: int) -> Box:
        """One data rank's part of a slice, divided like `torch.chunk`: the last may be empty."""
        each = -(-box.shape[0] // self.layout.dp)
        first = box.start[0] + dp * each
        return box.clip(0, min(first, box.stop[0]), min(first + each, box.stop[0]))
