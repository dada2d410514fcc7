"""Which image holds which key: a tensor of several deployments or ranks is stored once.

Frozen parts have separate images, so that no deployment depends on another for its base.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slackwater.model.errors import RefusedError
from slackwater.model.residency import ImageRange, PartRole, StateKey, StoredPart
from slackwater.policy.state.layout import ImageLayout, check_same, lay_out, merge_runs


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One deployment: the layout of all its parts on the device, and of those in its own image.

    `shared` are the images with the rest of its parts. If the deployment has frozen parts that no
    image has yet, one of them is new: the image `brings` with the parts `brought`.
    """

    on_device: ImageLayout
    stored: ImageLayout
    shared: tuple[str, ...]
    brings: str | None
    brought: ImageLayout


@dataclass(slots=True)
class Catalogue:
    """Entries by deployment, and the image of every stored key."""

    entries: dict[str, CatalogueEntry] = field(default_factory=dict)
    _images: dict[str, ImageLayout] = field(default_factory=dict)
    _owners: dict[StateKey, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def entry_for(self, deployment: str, parts: Sequence[StoredPart]) -> CatalogueEntry:
        """The entry that a deployment would get; scratch comes last: the rest is then one run."""
        order = {PartRole.KEPT: 0, PartRole.FROZEN: 1, PartRole.SCRATCH: 2}
        on_device = lay_out(sorted(parts, key=lambda part: order[part.role]))
        own: list[StoredPart] = []
        brought: list[StoredPart] = []
        shared: set[str] = set()
        for part in on_device.parts:
            owner = self._owners.get(part.key, deployment)
            if owner != deployment:
                check_same(self._part(owner, part.key), part)
                shared.add(owner)
            elif part.role is PartRole.KEPT:
                own.append(part)
            elif part.role is PartRole.FROZEN:
                brought.append(part)
        brings = f"frozen-{next(self._numbers)}" if brought else None
        images = (*sorted(shared), *([brings] if brings else []))
        return CatalogueEntry(on_device, lay_out(own), images, brings, lay_out(brought))

    def add(self, deployment: str, entry: CatalogueEntry) -> None:
        self.entries[deployment] = entry
        self._store(deployment, entry.stored)
        if entry.brings is not None:
            self._store(entry.brings, entry.brought)

    def _store(self, image: str, layout: ImageLayout) -> None:
        self._images[image] = layout
        for part in layout.parts:
            self._owners.setdefault(part.key, image)

    def image_bytes(self, image: str) -> int:
        """The size of an image; 0 if it is unknown."""
        layout = self._images.get(image)
        return 0 if layout is None else layout.bytes

    def check_unused(self, deployment: str) -> None:
        """Refuse to forget an image that other deployments share."""
        users = [name for name, entry in self.entries.items() if deployment in entry.shared]
        if users:
            raise RefusedError(
                f"state of {deployment}: is shared by {', '.join(sorted(users))}; forget those "
                "first"
            )

    def remove(self, image: str) -> None:
        """Remove a deployment with its image, or an image of frozen parts without users."""
        self.entries.pop(image, None)
        layout = self._images.pop(image, None)
        for part in layout.parts if layout else ():
            if self._owners.get(part.key) == image:
                del self._owners[part.key]

    def places(self, deployment: str) -> list[tuple[str, int] | None]:
        """For every part on the device in order: its image and offset; None if not stored."""
        offsets: dict[StateKey, tuple[str, int]] = {}
        entry = self.entries[deployment]
        for image in (*entry.shared, deployment):
            layout = self._images.get(image)
            if layout is None:
                raise RefusedError(f"state of {deployment}: {image}, which it shares, is gone")
            for part, offset in zip(layout.parts, layout.offsets, strict=True):
                offsets[part.key] = (image, offset)
        return [
            None if part.role is PartRole.SCRATCH else offsets[part.key]
            for part in entry.on_device.parts
        ]

    def stretches(self, deployment: str) -> tuple[ImageRange, ...]:
        """The ranges of host images for the bytes on the device, merged into few long runs."""
        layout = self.entries[deployment].on_device
        places: dict[tuple[str, bool, str], dict[int, tuple[int, int]]] = {}
        stored = self.places(deployment)
        for part, on_device, place in zip(layout.parts, layout.offsets, stored, strict=True):
            if place is None:
                continue
            owner, on_host = place
            writes = owner == deployment and part.role is PartRole.KEPT
            run = places.setdefault((owner, writes, part.key.kind), {})
            run[on_device] = (on_host, part.bytes)
        return tuple(
            ImageRange(owner, to, source, length, writes, kind)
            for (owner, writes, kind), runs in places.items()
            for to, source, length in merge_runs(runs)
        )

    def _part(self, owner: str, key: StateKey) -> StoredPart:
        return next(part for part in self._images[owner].parts if part.key == key)
