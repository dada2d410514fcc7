"""The state manager of one node, for its workers, its agent and other nodes (PlexRL 4.5, 5.3).

Every public call may come from any thread.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.control.state import commands as do
from slackwater.control.state import events as on
from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.residency import (
    Registration,
    StateBudgets,
    StateKey,
    StoredPart,
    Tier,
)
from slackwater.state.body import StateBody
from slackwater.state.image import Bytes, HostImage
from slackwater.state.port import About, DeviceHolder


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A deployment's parts as on the device, and the memory of stored ones by number."""

    on_device: tuple[StoredPart, ...]
    stored: dict[int, Bytes]


class StateManager:
    """See the module. `StateClient` has the calls of a worker in another process."""

    def __init__(self, budgets: StateBudgets, folder: Path) -> None:
        self._body = body = StateBody(budgets, folder)
        self.book, self.catalogue, self.disk = body.book, body.catalogue, body.disk
        self.moved_bytes = body.moved_bytes  # by the tiers between which they were moved
        self._devices: dict[str, str] = {}  # of holders

    def attach(self, name: str, holder: DeviceHolder, device: str = "") -> None:
        """A worker is there, with its device of the node, or its part of the only one."""
        with self._body.lock:
            self._body.holders[name] = holder
            self._devices[name] = device

    def holder_gone(self, name: str) -> None:
        """A worker has ended: what was on its device falls back to the last image."""
        with self._body.lock:
            self._body.holder_gone(name)
            self._devices.pop(name, None)

    def register(
        self, deployment: str, holder: str, parts: Sequence[StoredPart], *, warm: bool = True
    ) -> Registration:
        """Keep a state, or adopt one whose worker has gone; RefusedError if there is no room."""
        with self._body.lock:
            known = self.catalogue.entries.get(deployment)
            entry = self.catalogue.entry_for(deployment, parts)
            if known is not None and known.on_device != entry.on_device:
                raise RefusedError(f"state of {deployment}: is known here with other tensors")
            entry = known or entry
            sizes = (entry.on_device.bytes, entry.stored.bytes)
            borrows = tuple(
                (image, entry.brought.bytes if image == entry.brings else 0)
                for image in entry.shared
            )
            event = on.DeploymentRegistered(
                *(time.monotonic(), deployment, holder, *sizes, warm, borrows),
                device=self._devices.get(holder, ""),
            )
            said = self._body.tell(event)[0]
            if isinstance(said, do.Refuse):
                raise RefusedError(said.reason)
            assert isinstance(said, do.Admit)
            self._body.held_by[deployment] = holder
            self.catalogue.add(deployment, entry)
            return Registration(said.blank, self.catalogue.stretches(deployment), sizes[0])

    def ensure(
        self, deployment: str, tier: Tier, *, lease: bool = False, timeout_s: float = 600.0
    ) -> None:
        """Return when the state is at least on that tier; with `lease` it stays until released."""
        self._body.ask(
            lambda ticket: on.ResidencyAsked(time.monotonic(), ticket, deployment, tier, lease),
            timeout_s,
            f"{deployment} on the {tier.name.lower()} tier",
        )

    def release(self, deployment: str) -> None:
        self._body.tell(on.LeaseReleased(time.monotonic(), deployment))

    def evict(self, deployment: str, tier: Tier = Tier.HOST, *, timeout_s: float = 600.0) -> None:
        """Return when the state is at most on that tier; a running operation ends first."""
        self._body.ask(
            lambda ticket: on.EvictionAsked(time.monotonic(), ticket, deployment, tier),
            timeout_s,
            f"{deployment} off the tiers above {tier.name.lower()}",
        )

    def prefetch(self, deployments: Sequence[str]) -> None:
        """The scheduler's hint: what runs next, in order. Returns at once."""
        self._body.tell(on.NextHinted(time.monotonic(), tuple(deployments)))

    def prefetch_models(self, models: Sequence[str], holding: Sequence[str] = ()) -> None:
        """As `prefetch`, for the deployments of trainers' models, which are called MODEL@WORKER.

        Those of `holding` are in the middle of a phase, and are not pushed out by it.
        """

        def of(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(d for name in names for d in known if d.startswith(f"{name}@"))

        with self._body.lock:
            known = list(self.catalogue.entries)
            self._body.tell(on.NextHinted(time.monotonic(), of(models), of(holding)))

    def counts(self) -> dict[str, float]:
        """Operations that found their state on the device, those that waited, and early loads."""
        book = self.book
        return {"found": book.found, "waited": book.waited, "early": book.early}

    @contextlib.contextmanager
    def reading(self, deployment: str) -> Iterator[HostImage]:
        """The host image, kept unchanged meanwhile; NotFoundError where there is none."""
        with self._body.lock:
            image = self.image(deployment)
            self._body.tell(on.ReadingBegan(time.monotonic(), deployment))
        try:
            yield image
        finally:
            self._body.tell(on.ReadingEnded(time.monotonic(), deployment))

    @contextlib.contextmanager
    def reading_parts(self, deployment: str) -> Iterator[StoredParts]:
        """All parts in host memory, shared ones too, kept unchanged meanwhile."""
        with contextlib.ExitStack() as stack:
            with self._body.lock:
                entry = self.catalogue.entries.get(deployment)
                if entry is None:
                    raise NotFoundError(f"state of {deployment}: is not known here")
                names = (deployment, *entry.shared)
                images = {name: stack.enter_context(self.reading(name)) for name in names}
                places = self.catalogue.places(deployment)
            yield StoredParts(
                entry.on_device.parts,
                {
                    number: images[place[0]].data[place[1] : place[1] + part.bytes]
                    for number, (part, place) in enumerate(
                        zip(entry.on_device.parts, places, strict=True)
                    )
                    if place is not None
                },
            )

    def is_blank(self, deployment: str) -> bool:
        """Whether nothing was ever computed on it, or it is not known."""
        with self._body.lock:
            return self.book.is_blank(deployment)

    def forget(self, deployment: str) -> None:
        """Nobody needs the state any more."""
        with self._body.lock:
            self._body.forget(deployment)

    def forget_when_unused(self, deployment: str) -> None:
        """As `forget`, but what others share of it stays until they go too."""
        self._body.forget_when_unused(deployment)

    def forget_abandoned(self, prefix: str) -> None:
        """Forget the deployments of that prefix whose workers have gone."""
        with self._body.lock:
            for name in [n for n in self.catalogue.entries if n.startswith(prefix)]:
                if not self._body.has_worker(name):
                    self._body.forget_when_unused(name)

    def held(self, prefix: str) -> str | None:
        """The state of that beginning that a worker has."""
        with self._body.lock:
            known = [name for name in self.catalogue.entries if name.startswith(prefix)]
            return next((n for n in known if self._body.has_worker(n)), None)

    def survivor(self, prefix: str, after: int, at_most: int) -> str | None:
        """The newest state of that prefix without a worker, with `after` < seq <= `at_most`."""
        with self._body.lock:
            found = [
                (int(self._body.abouts.get(name, {}).get("seq", -1)), name)
                for name in self.catalogue.entries
                if name.startswith(prefix) and not self._body.has_worker(name)
                if not self.book.is_blank(name)
            ]
            return max((one for one in found if after < one[0] <= at_most), default=(0, None))[1]

    def tiers(self) -> dict[str, Tier]:
        """Where every deployment's newest state is."""
        with self._body.lock:
            found = {name: self.book.tier(name) for name in self.catalogue.entries}
            return {name: tier for name, tier in found.items() if tier is not None}

    def about(self, deployment: str) -> About:
        """What was said of the state when it was last saved."""
        with self._body.lock:
            return self._body.abouts.get(deployment, {})

    def image(self, deployment: str) -> HostImage:
        """The host image; NotFoundError where it is not in host memory."""
        with self._body.lock:
            try:
                return self._body.images[deployment]
            except KeyError:
                raise NotFoundError(f"state of {deployment}: is not in host memory") from None

    @contextlib.contextmanager
    def taking(
        self, deployment: str, parts: Sequence[StoredPart], about: About, *, warm: bool = True
    ) -> Iterator[dict[int, Bytes]]:
        """Take over a state from another node into host memory; its worker registers later.

        Inside, fill the memory of the missing parts, given by their number among `parts`. If that
        fails, the state is forgotten.
        """
        holder = f"arrival of {deployment}"
        self.register(deployment, holder, parts, warm=warm)
        try:
            self.ensure(deployment, Tier.HOST)
            with self.reading_parts(deployment) as stored:
                lacking = self._lacking(deployment)
                asked = {part.key: number for number, part in enumerate(parts)}
                yield {
                    asked[part.key]: stored.stored[number]
                    for number, part in enumerate(stored.on_device)
                    if part.key in lacking
                }
                self._filled(deployment)
            with self._body.lock:
                if deployment not in self.catalogue.entries:
                    raise UnavailableError(f"state of {deployment}: was forgotten as it came")
                self._body.abouts[deployment] = about
                self._body.tell(on.HolderGone(time.monotonic(), holder))
        except BaseException:
            self.forget_when_unused(deployment)
            raise

    def _lacking(self, deployment: str) -> set[StateKey]:
        """What it has that no image on this node has yet."""
        with self._body.lock:
            places = self.catalogue.places(deployment)
            parts = self.catalogue.entries[deployment].on_device.parts
            return {
                part.key
                for part, place in zip(parts, places, strict=True)
                if place is not None and self.book.is_blank(place[0])
            }

    def _filled(self, deployment: str) -> None:
        """Its own image, and the frozen parts that it brought, are whole in host memory."""
        with self._body.lock:
            entry = self.catalogue.entries.get(deployment)
            for image in (*entry.shared, deployment) if entry is not None else ():
                if self.book.is_blank(image):
                    self._body.tell(on.DeploymentFilled(time.monotonic(), image))

    def close(self) -> None:
        """Give all host memory back. Holders must have ended."""
        self._body.close()
