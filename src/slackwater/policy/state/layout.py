"""The canonical form of a deployment's state: each part once, at a place of one image (PlexRL
4.5.2).

Parts are known by key, so that data-parallel replicas, which bring the same keys, are stored once,
and any slicing can be rebuilt from the slices that are stored.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slackwater.model.errors import ConfigError
from slackwater.model.residency import PartRole, StateKey, StoredPart

_RUN_ALIGNMENT = 64  # where the kind changes; inside a kind parts lie end to end, as one vector


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """Where each part begins in the image, in order, and the image's length."""

    parts: tuple[StoredPart, ...]
    offsets: tuple[int, ...]
    bytes: int

    def place(self, key: StateKey) -> int:
        """Where a key's bytes begin."""
        for part, offset in zip(self.parts, self.offsets, strict=True):
            if part.key == key:
                return offset
        raise KeyError(str(key))


def laid_out(parts: Sequence[StoredPart]) -> ImageLayout:
    """The parts in their order, each once; vectors of one kind and type stay whole."""
    offsets: list[int] = []
    chosen = list(unique(parts))
    stop = 0
    before: tuple[str, str, PartRole] | None = None
    for part in chosen:
        run = (part.key.kind, part.dtype, part.role)
        if run != before:
            stop = aligned(stop, _RUN_ALIGNMENT)
        before = run
        offsets.append(stop)
        stop += part.bytes
    return ImageLayout(tuple(chosen), tuple(offsets), stop)


def aligned(place: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-place // to) * to


def unique(parts: Iterable[StoredPart]) -> Iterable[StoredPart]:
    """Each key once; the same key with another type or role is refused."""
    seen: dict[StateKey, StoredPart] = {}
    for part in parts:
        if part.key in seen:
            check_same(seen[part.key], part)
        else:
            seen[part.key] = part
            yield part


def check_same(known: StoredPart, part: StoredPart) -> None:
    """Replicas must describe a tensor alike; one that does not has the wrong name."""
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


@dataclass(frozen=True, slots=True)
class ImagePiece:
    """So many elements of a stored part, from one of its elements on, to an element of the wanted
    slice.
    """

    stored: StateKey
    from_element: int
    to_element: int
    elements: int


def pieces_of(wanted: StateKey, stored: Iterable[StateKey]) -> list[ImagePiece]:
    """How a slice is put together from the slices that are stored, whatever layout they were stored
    under.
    """
    candidates = sorted(
        (key for key in stored if _same_tensor(key, wanted)), key=lambda key: key.start
    )
    pieces: list[ImagePiece] = []
    at = wanted.start
    for key in candidates:
        if key.start > at or at >= wanted.stop:
            break
        if key.stop <= at:
            continue
        stop = min(key.stop, wanted.stop)
        pieces.append(ImagePiece(key, at - key.start, at - wanted.start, stop - at))
        at = stop
    if at < wanted.stop:
        raise ConfigError.of(
            "state slice", str(wanted), f"is not stored whole: elements from {at} on are missing"
        )
    return pieces


def _same_tensor(one: StateKey, other: StateKey) -> bool:
    return (one.job, one.model, one.parameter, one.kind) == (
        other.job,
        other.model,
        other.parameter,
        other.kind,
    )


def merged_runs(places: Mapping[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Copies `{to: (from, length)}` as few long ones: neighbours on both sides become one `(to,
    from, length)`.
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
