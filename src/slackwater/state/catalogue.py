"""Which image holds which key: a tensor that several deployments or ranks have is stored once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from slackwater.model.errors import RefusedError
from slackwater.model.residency import Part, Role, StateKey
from slackwater.policy.state.layout import Layout, check_same, laid_out, merged_runs
from slackwater.state.port import Stretch


@dataclass(frozen=True, slots=True)
class Entry:
    """One deployment: all its parts as they lie on the device, and those that its own image stores."""

    on_device: Layout
    stored: Layout
    borrowed_from: frozenset[str]


@dataclass(slots=True)
class Catalogue:
    """Entries by deployment, and for every stored key the deployment whose image has it."""

    entries: dict[str, Entry] = field(default_factory=dict)
    sealed: set[str] = field(default_factory=set)  # deployments whose frozen parts are on the host
    _owners: dict[StateKey, str] = field(default_factory=dict)

    def entry_for(self, deployment: str, parts: Sequence[Part]) -> Entry:
        """What the deployment's entry would be; nothing is changed. Scratch lies last, so that the rest is one run."""
        order = {Role.KEPT: 0, Role.FROZEN: 1, Role.SCRATCH: 2}
        on_device = laid_out(sorted(parts, key=lambda part: order[part.role]))
        own: list[Part] = []
        borrowed: set[str] = set()
        for part in on_device.parts:
            owner = self._owners.get(part.key, deployment)
            if part.role is Role.FROZEN and owner not in self.sealed:
                owner = deployment  # there is nothing to share yet
            if owner != deployment:
                check_same(self._part(owner, part.key), part)
                borrowed.add(owner)
            elif part.role is not Role.SCRATCH:
                own.append(part)
        return Entry(on_device, laid_out(own), frozenset(borrowed))

    def add(self, deployment: str, entry: Entry) -> None:
        self.entries[deployment] = entry
        for part in entry.stored.parts:
            self._owners.setdefault(part.key, deployment)

    def check_unused(self, deployment: str) -> None:
        """Refuse to forget an image that others read."""
        users = [name for name, entry in self.entries.items() if deployment in entry.borrowed_from]
        if users:
            raise RefusedError(
                f"state of {deployment}: is shared by {', '.join(sorted(users))}; forget those first"
            )

    def remove(self, deployment: str) -> None:
        entry = self.entries.pop(deployment, None)
        self.sealed.discard(deployment)
        for part in entry.stored.parts if entry else ():
            if self._owners.get(part.key) == deployment:
                del self._owners[part.key]

    def stored_of(self, job: str, model: str) -> dict[StateKey, tuple[str, int, Part]]:
        """Every stored part of one model, whoever brought it: its image, its place there, and what it is."""
        return {
            part.key: (owner, offset, part)
            for owner, entry in self.entries.items()
            for part, offset in zip(entry.stored.parts, entry.stored.offsets, strict=True)
            if (part.key.job, part.key.model) == (job, model)
        }

    def places(self, deployment: str) -> list[tuple[str, int] | None]:
        """For every part on the device, in order: whose image stores it, and where; None if it is not stored."""
        entry = self.entries[deployment]
        own = {part.key for part in entry.stored.parts}
        offsets: dict[str, dict[StateKey, int]] = {}
        found: list[tuple[str, int] | None] = []
        for part in entry.on_device.parts:
            if part.role is Role.SCRATCH:
                found.append(None)
                continue
            owner = deployment if part.key in own else self._owners[part.key]
            if owner not in offsets:
                stored = self.entries[owner].stored
                held = zip(stored.parts, stored.offsets, strict=True)
                offsets[owner] = {each.key: offset for each, offset in held}
            found.append((owner, offsets[owner][part.key]))
        return found

    def stretches(self, deployment: str) -> tuple[Stretch, ...]:
        """Where the device image's bytes are on the host, in few long runs."""
        layout = self.entries[deployment].on_device
        places: dict[tuple[str, bool, str], dict[int, tuple[int, int]]] = {}
        stored = self.places(deployment)
        for part, on_device, place in zip(layout.parts, layout.offsets, stored, strict=True):
            if place is None:
                continue
            owner, on_host = place
            writes = owner == deployment and part.role is Role.KEPT
            run = places.setdefault((owner, writes, part.key.kind), {})
            run[on_device] = (on_host, part.bytes)
        return tuple(
            Stretch(owner, to, source, length, writes, kind)
            for (owner, writes, kind), runs in places.items()
            for to, source, length in merged_runs(runs)
        )

    def _part(self, owner: str, key: StateKey) -> Part:
        return next(part for part in self.entries[owner].stored.parts if part.key == key)
