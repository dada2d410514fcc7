"""The state manager of one node, for its workers, its agent and other nodes (PlexRL 4.5, 5.3).

Every public method is thread-safe.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.control.state import commands, events
from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.residency import (
    Registration,
    StateBudgets,
    StateKey,
    StoredPart,
    Tier,
)
from slackwater.state.executor import ResidencyExecutor
from slackwater.state.image import Bytes, HostImage
from slackwater.state.port import About, DeviceHolder


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A deployment's parts in device order, and the host memory of stored ones by their index."""

    on_device: tuple[StoredPart, ...]
    stored: dict[int, Bytes]


class StateManager(ResidencyExecutor):
    """Keeps states on the device, in host memory or on disk. `StateClient` has a worker's calls."""

    def __init__(self, budgets: StateBudgets, folder: Path) -> None:
        super().__init__(budgets, folder)
        self._devices: dict[str, str] = {}  # by holder

    def attach(self, name: str, holder: DeviceHolder, device: str = "") -> None:
        """Add a worker, with its device of the node or its part of the only one."""
        with self.lock:
            self.holders[name] = holder
            self._devices[name] = device

    def remove_holder(self, name: str) -> None:
        super().remove_holder(name)
        self._devices.pop(name, None)

    def register(
        self, deployment: str, holder: str, parts: Sequence[StoredPart], *, warm: bool = True
    ) -> Registration:
        """Add a state, or adopt one whose worker has ended; RefusedError if it does not fit."""
        with self.lock:
            known = self.catalogue.entries.get(deployment)
            entry = self.catalogue.entry_for(deployment, parts)
            if known is not None and known.on_device != entry.on_device:
                raise RefusedError(f"state of {deployment}: is known here with other tensors")
            entry = known or entry
            borrows = tuple(
                (image, entry.brought.bytes if image == entry.brings else 0)
                for image in entry.shared
            )
            event = events.DeploymentRegistered(
                time.monotonic(),
                deployment,
                holder,
                entry.on_device.bytes,
                entry.stored.bytes,
                warm,
                borrows,
                device=self._devices.get(holder, ""),
            )
            command = self.tell(event)[0]
            if isinstance(command, commands.Refuse):
                raise RefusedError(command.reason)
            assert isinstance(command, commands.Admit)
            self.held_by[deployment] = holder
            self.catalogue.add(deployment, entry)
            stretches = self.catalogue.stretches(deployment)
            return Registration(command.blank, stretches, entry.on_device.bytes)

    def ensure(
        self, deployment: str, tier: Tier, *, lease: bool = False, timeout_s: float = 600.0
    ) -> None:
        """Wait until the state is at least on that tier; with `lease` it stays until `release`."""
        self.ask(
            lambda ticket: events.ResidencyAsked(time.monotonic(), ticket, deployment, tier, lease),
            timeout_s,
            f"{deployment} on the {tier.name.lower()} tier",
        )

    def release(self, deployment: str) -> None:
        self.tell(events.LeaseReleased(time.monotonic(), deployment))

    def evict(self, deployment: str, tier: Tier = Tier.HOST, *, timeout_s: float = 600.0) -> None:
        """Wait until the state is at most on that tier; a running operation ends first."""
        self.ask(
            lambda ticket: events.EvictionAsked(time.monotonic(), ticket, deployment, tier),
            timeout_s,
            f"{deployment} off the tiers above {tier.name.lower()}",
        )

    def prefetch_models(self, models: Sequence[str], holding: Sequence[str] = ()) -> None:
        """A hint which trainers' models run next, in order; their deployments are MODEL@WORKER.

        Models in `holding` are in the middle of a phase: prefetching does not evict them.
        """

        def find_deployments(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(d for name in names for d in known if d.startswith(f"{name}@"))

        with self.lock:
            known = list(self.catalogue.entries)
            next_up, kept = find_deployments(models), find_deployments(holding)
            self.tell(events.NextHinted(time.monotonic(), next_up, kept))

    def counts(self) -> dict[str, float]:
        """Operations that found their state on the device, those that waited, and early loads."""
        controller = self.controller
        return {
            "found": controller.found,
            "waited": controller.waited,
            "early": controller.early,
        }

    @contextlib.contextmanager
    def reading(self, deployment: str) -> Iterator[HostImage]:
        """The host image, unchanged inside the context; NotFoundError if there is none."""
        with self.lock:
            image = self.image(deployment)
            self.tell(events.ReadingBegan(time.monotonic(), deployment))
        try:
            yield image
        finally:
            self.tell(events.ReadingEnded(time.monotonic(), deployment))

    @contextlib.contextmanager
    def reading_parts(self, deployment: str) -> Iterator[StoredParts]:
        """All parts in host memory, including shared ones, unchanged inside the context."""
        with contextlib.ExitStack() as stack:
            with self.lock:
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
        """Whether the state has no content yet, or is unknown."""
        with self.lock:
            return self.controller.is_blank(deployment)

    def forget_abandoned(self, prefix: str) -> None:
        """Forget the deployments with that prefix whose workers have ended."""
        with self.lock:
            for name in [n for n in self.catalogue.entries if n.startswith(prefix)]:
                if not self.has_worker(name):
                    self.forget_when_unused(name)

    def find_active(self, prefix: str) -> str | None:
        """A deployment with that prefix whose worker runs."""
        with self.lock:
            known = [name for name in self.catalogue.entries if name.startswith(prefix)]
            return next((n for n in known if self.has_worker(n)), None)

    def survivor(self, prefix: str, after: int, at_most: int) -> str | None:
        """The newest state of that prefix without a worker, with `after` < seq <= `at_most`."""
        with self.lock:
            found = [
                (int(self.abouts.get(name, {}).get("seq", -1)), name)
                for name in self.catalogue.entries
                if name.startswith(prefix) and not self.has_worker(name)
                if not self.controller.is_blank(name)
            ]
            return max((each for each in found if after < each[0] <= at_most), default=(0, None))[1]

    def about(self, deployment: str) -> About:
        """The `about` of the state when it was last saved."""
        with self.lock:
            return self.abouts.get(deployment, {})

    def image(self, deployment: str) -> HostImage:
        """The host image; NotFoundError if it is not in host memory."""
        with self.lock:
            try:
                return self.images[deployment]
            except KeyError:
                raise NotFoundError(f"state of {deployment}: is not in host memory") from None

    @contextlib.contextmanager
    def receive(
        self, deployment: str, parts: Sequence[StoredPart], about: About, *, warm: bool = True
    ) -> Iterator[dict[int, Bytes]]:
        """Receive a state from another node into host memory; its worker registers later.

        Inside the context, the caller fills the memory of the missing parts, which are given by
        their index in `parts`. If that fails, the state is forgotten.
        """
        holder = f"arrival of {deployment}"
        self.register(deployment, holder, parts, warm=warm)
        try:
            self.ensure(deployment, Tier.HOST)
            with self.reading_parts(deployment) as stored:
                missing = self._find_missing(deployment)
                numbers = {part.key: number for number, part in enumerate(parts)}
                yield {
                    numbers[part.key]: stored.stored[number]
                    for number, part in enumerate(stored.on_device)
                    if part.key in missing
                }
                self._mark_filled(deployment)
            with self.lock:
                if deployment not in self.catalogue.entries:
                    raise UnavailableError(f"state of {deployment}: was forgotten while it arrived")
                self.abouts[deployment] = about
                self.tell(events.HolderGone(time.monotonic(), holder))
        except BaseException:
            self.forget_when_unused(deployment)
            raise

    def _find_missing(self, deployment: str) -> set[StateKey]:
        """The deployment's parts whose image on this node has no content yet."""
        with self.lock:
            places = self.catalogue.places(deployment)
            parts = self.catalogue.entries[deployment].on_device.parts
            return {
                part.key
                for part, place in zip(parts, places, strict=True)
                if place is not None and self.controller.is_blank(place[0])
            }

    def _mark_filled(self, deployment: str) -> None:
        """Its own image, and the new images of frozen parts, are complete in host memory."""
        with self.lock:
            entry = self.catalogue.entries.get(deployment)
            for image in (*entry.shared, deployment) if entry is not None else ():
                if self.controller.is_blank(image):
                    self.tell(events.DeploymentFilled(time.monotonic(), image))
