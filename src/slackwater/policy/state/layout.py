"""The canonical layout of a deployment's state: each part once, by key, at an offset of one image.
So data-parallel replicas are stored once (PlexRL 4.5.2).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.residency import PartRole, StateKey, StoredPart

_RUN_ALIGNMENT = 64  # between kinds of parts; parts of one kind are contiguous, as one vector


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The parts of an image in order, their offsets, and the image's length."""

    parts: tuple[StoredPart, ...]
    offsets: tuple[int, ...]
    bytes: int

    def place(self, key: StateKey) -> int:
        """The offset of a key's bytes."""
        for part, offset in zip(self.parts, self.offsets, strict=True):
            if part.key == key:
                return offset
        raise KeyError(str(key))


def lay_out(parts: Sequence[StoredPart]) -> ImageLayout:
    """Lay out the parts in their order, each once. Vectors of one kind and type are contiguous."""
    offsets: list[int] = []
    chosen = list(iter_unique(parts))
    stop = 0
    before: tuple[str, str, PartRole] | None = None
    for part in chosen:
        run = (part.key.kind, part.dtype, part.role)
        if run != before:
            stop = align_up(stop, _RUN_ALIGNMENT)
        before = run
        offsets.append(stop)
        stop += part.bytes
    return ImageLayout(tuple(chosen), tuple(offsets), stop)


def align_up(place: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-place // to) * to


def iter_unique(parts: Iterable[StoredPart]) -> Iterable[StoredPart]:
    """Each key once. The same key with another type or role is an error."""
    seen: dict[StateKey, StoredPart] = {}
    for part in parts:
        if part.key in seen:
            check_same(seen[part.key], part)
        else:
            seen[part.key] = part
            yield part


def check_same(known: StoredPart, part: StoredPart) -> None:
    """Raise an error if two replicas describe a tensor differently."""
    if (known.dtype, known.element_bytes, known.role) != (
        part.dtype,
        part.element_bytes,
        part.role,
    ):
        raise ConfigError.of(
            f"state part {part.key}",
            f"{part.dtype} {part.role.value}",
            f"must be {known.dtype} {known.role.value}, as its replica is",
        )


def merge_runs(places: Mapping[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Join copies `{to: (from, length)}` that are adjacent on both sides, into `(to, from,
    length)`.
    """
    runs: list[tuple[int, int, int]] = []
    for to in sorted(places):
        source, length = places[to]
        if runs and runs[-1][0] + runs[-1][2] == to and runs[-1][1] + runs[-1][2] == source:
            first_to, first_source, first_length = runs[-1]
            runs[-1] = (first_to, first_source, first_length + length)
        else:
            runs.append((to, source, length))
    return runs
