"""From a model's names and shapes to what each rank of a layout holds (ROSE 4.2, shard-aware
routing).

Slices are given in the coordinates of the whole, unfused model, so two layouts meet there whatever
each of them fuses, pads, stacks or repeats.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod

from slackwater.model.errors import ConfigError
from slackwater.weights.plan.layout import Layout, RankPosition

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements from `start` up to, not including, `stop`, in every dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def along(self, dim: int, start: int, stop: int) -> "Box":
        """The part of this box between two places of one dimension, which may be empty."""
        starts, stops = list(self.start), list(self.stop)
        starts[dim] = max(starts[dim], start)
        stops[dim] = max(min(stops[dim], stop), starts[dim])
        return Box(tuple(starts), tuple(stops))

    def common(self, other: "Box") -> "Box | None":
        """What both hold, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, other: "Box") -> tuple[slice, ...]:
        """This box as an index into the array that holds `other`."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.start, self.stop, other.start, strict=True)
        )


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
    """`fused` is the tensor it is part of on a fused rank, at `order`; `expert` is its expert."""

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


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A slice `box` of the model's `tensor` lies in the rank's `local` tensor from `at` on.

    Where the local tensor has one dimension more (stacked experts), `at` begins with the place in
    it.
    """

    tensor: str
    box: Box
    local: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankShards:
    """What one rank holds: its tensors with their shapes, and where the model's slices lie."""

    shapes: Shapes
    pieces: tuple[ShardPiece, ...]

    def find(self, tensor: str, box: Box) -> tuple[str, tuple[slice, ...]]:
        """The local tensor that holds a slice of the model, and where (no stacked experts)."""
        for piece in self.pieces:
            if piece.tensor == tensor and piece.box.common(box) == box:
                inner = zip(piece.at, box.within(piece.box), strict=True)
                return piece.local, tuple(slice(a + s.start, a + s.stop) for a, s in inner)
        raise KeyError(f"{tensor} {box}")


class ShardMap:
    """The slices of every rank of a model under one layout, with heads of width `head_dim`."""

    def __init__(self, shapes: Shapes, head_dim: int, layout: Layout) -> None:
        self.layout = layout
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._parameters = parameters_of(shapes)
        self._head_dim = head_dim
        layers = [p.layer for p in self._parameters if p.layer is not None]
        self._layers = max(layers, default=-1) + 1
        experts = [p.expert for p in self._parameters if p.expert is not None]
        self._experts = max(experts, default=-1) + 1
        if self._experts and self._experts % layout.ep:
            raise ConfigError.of("layout ep", layout.ep, f"must divide {self._experts} experts")
        self._tied = not any("lm_head" in p.name for p in self._parameters)

    def rank(self, rank: int) -> RankShards:
        """What a rank holds."""
        place = self.layout.place(rank)
        parts: defaultdict[str, list[tuple[Parameter, Box, int]]] = defaultdict(list)
        for parameter, local in self._held(place):
            box, rows = self._cut(parameter, place)
            if self.layout.fsdp and self.layout.dp > 1:
                box, rows = self._share_rows(box, place.dp)
            parts[local].append((parameter, box, rows))
        shapes: dict[str, tuple[int, ...]] = {}
        pieces: list[ShardPiece] = []
        for local, members in parts.items():
            shapes[local] = self._laid_out(local, members, pieces)
        return RankShards(shapes, tuple(pieces))

    def _held(self, place: RankPosition) -> Iterator[tuple[Parameter, str]]:
        """The parameters of which a rank holds something, each with its local tensor's name."""
        layout = self.layout
        mine = layout.stage_layers(self._layers, place.pp) if self._layers else range(0)
        for parameter in self._parameters:
            if parameter.layer is not None:
                here = parameter.layer in mine
            else:
                here = place.pp == (0 if parameter.first_stage else layout.pp - 1)
            if here and self._expert_here(parameter, place):
                fused = parameter.fused if layout.fused else None
                yield parameter, parameter.name if fused is None else fused
            if parameter.first_stage and self._tied and 0 < place.pp == layout.pp - 1:
                yield parameter, "lm_head.weight"  # the last stage reads the embedding too

    def _expert_here(self, parameter: Parameter, place: RankPosition) -> bool:
        if parameter.expert is None or self.layout.ep == 1:
            return True
        each = self._experts // self.layout.ep
        return parameter.expert // each == place.ep

    def _cut(self, parameter: Parameter, place: RankPosition) -> tuple[Box, int]:
        """The rank's slice of a parameter, and the rows that it takes locally."""
        whole, tp = Box.whole(parameter.shape), self.layout.tp
        rows = parameter.shape[0]
        if parameter.cut is TensorSplit.NOT or (
            parameter.expert is not None and self.layout.ep > 1
        ):
            return whole, rows
        if parameter.cut is TensorSplit.VOCABULARY:
            multiple = self.layout.vocab_multiple or 1
            each = -(-rows // (multiple * tp)) * multiple
            first = min(place.tp * each, rows)
            part = whole.along(0, first, min(first + each, rows))
            return part, each if self.layout.vocab_multiple else part.shape[0]
        dim = 1 if parameter.cut is TensorSplit.COLUMNS else 0
        units, width = parameter.shape[dim], 1
        if parameter.cut in (TensorSplit.HEADS, TensorSplit.KV_HEADS):
            units, width = units // self._head_dim, self._head_dim
        if parameter.cut is TensorSplit.KV_HEADS and units < tp:
            if tp % units:
                raise ConfigError.of("layout tp", tp, f"must be a multiple of {units} kv heads")
            first, last = place.tp * units // tp, place.tp * units // tp + 1
        elif units % tp:
            raise ConfigError.of(
                "layout tp", tp, f"must divide {units} {parameter.cut.value} of {parameter.name}"
            )
        else:
            first, last = place.tp * units // tp, (place.tp + 1) * units // tp
        box = whole.along(dim, first * width, last * width)
        return box, box.shape[0]

    def _share_rows(self, box: Box, dp: int) -> tuple[Box, int]:
        """One data rank's part of a slice, as `torch.chunk` divides it: the last may be empty."""
        each = -(-box.shape[0] // self.layout.dp)
        first = box.start[0] + dp * each
        part = box.along(0, min(first, box.stop[0]), min(first + each, box.stop[0]))
        return part, part.shape[0]

    def _laid_out(
        self, local: str, members: list[tuple[Parameter, Box, int]], pieces: list[ShardPiece]
    ) -> tuple[int, ...]:
        """Put a local tensor's slices (or experts) one behind the other; its shape."""
        stacked = self.layout.fused and members[0][0].expert is not None
        members.sort(key=lambda member: (member[0].expert or 0, member[0].order))
        experts = sorted({parameter.expert or 0 for parameter, _, _ in members})
        row, expert = 0, experts[0]
        for parameter, box, rows in members:
            if (parameter.expert or 0) != expert:
                expert, row = parameter.expert or 0, 0
            at = (row,) + (0,) * (len(box.shape) - 1)
            if stacked:
                at = (experts.index(expert), *at)
            if box.elements:
                pieces.append(ShardPiece(parameter.name, box, local, at))
            row += rows
        shape = (row, *members[0][1].shape[1:])
        return (len(experts), *shape) if stacked else shape
