"""From a model's names and shapes to what each rank of a layout holds (ROSE 4.2, shard-aware
routing).

Slices are given in the coordinates of the whole, unfused model, so two layouts meet there whatever
each of them fuses, pads, stacks or repeats.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.weights.plan.box import Box
from slackwater.weights.plan.layout import Layout, RankPosition
from slackwater.weights.plan.parameter import Parameter, Shapes, TensorSplit, parameters_of


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
    """What one rank holds: its tensors with their shapes, and where every slice of the model lies
    in them.
    """

    shapes: Shapes
    pieces: tuple[ShardPiece, ...]

    def find(self, tensor: str, box: Box) -> tuple[str, tuple[slice, ...]]:
        """The local tensor that holds a slice of the model, and where in it (not among stacked
        experts).
        """
        for piece in self.pieces:
            if piece.tensor == tensor and piece.box.common(box) == box:
                inner = zip(piece.at, box.within(piece.box), strict=True)
                return piece.local, tuple(slice(a + s.start, a + s.stop) for a, s in inner)
        raise KeyError(f"{tensor} {box}")


class ShardMap:
    """The slices of every rank of one model under one layout. `head_dim` says how wide an attention
    head is.
    """

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
        """The parameters of which a rank holds something, each with the name of its local
        tensor.
        """
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
        """Put a local tensor's slices one below the other (experts: one behind the other); its
        shape.
        """
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
