"""The state manager of one node: the live body of the book of states (PlexRL 4.5, 5.3).

It owns the host images and the disk tier. Workers' parts of the device are holders: told to load or save, they copy between their
device memory and the images, which stay the manager's. Every public call may come from any thread.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from slackwater.control.state import commands as do
from slackwater.control.state import events as on
from slackwater.control.state.book import StateBook
from slackwater.model.errors import NotFoundError, RefusedError, SlackwaterError, UnavailableError
from slackwater.model.residency import Part, StateBudgets, Tier
from slackwater.state.arrival import Arrival
from slackwater.state.catalogue import Catalogue
from slackwater.state.disk import DiskTier
from slackwater.state.image import Bytes, HostImage, pages_for
from slackwater.state.materials import write_checkpoint
from slackwater.state.port import About, Ended, Holder, HolderMove, Registered

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredParts:
    """A deployment's parts as they lie on the device, and the memory of those that are stored, by their number."""

    on_device: tuple[Part, ...]
    stored: dict[int, Bytes]


class StateManager:
    """See the module; a `StatePort` for workers of the same process."""

    def __init__(self, budgets: StateBudgets, folder: Path) -> None:
        self.book = StateBook(budgets)
        self.disk = DiskTier(folder)
        self.catalogue = Catalogue()
        self._holders: dict[str, Holder] = {}
        self._held_by: dict[str, str] = {}
        self._images: dict[str, HostImage] = {}
        self._arriving: dict[str, tuple[HostImage, Arrival]] = {}  # being read from disk
        self._to_follow: dict[str, do.Move] = {}  # wait for the first byte of what they follow
        self._following: dict[str, str | None] = {}  # with what became of the reading, if it failed
        self._spare: list[HostImage] = []  # of states that left: their pages are made already
        self._abouts: dict[str, About] = {}
        self._orphans: set[str] = set()  # forgotten, but others still share their frozen parts
        self._lock = threading.RLock()
        self._answered = threading.Condition(self._lock)
        self._answers: dict[int, str | None] = {}
        self._tickets = itertools.count(1)
        self._disk_work = ThreadPoolExecutor(1, "state-disk-moves")
        self.moved_bytes: dict[tuple[Tier, Tier], int] = {}

    def attach(self, name: str, holder: Holder) -> None:
        """A worker is there, with its part of the device."""
        with self._lock:
            self._holders[name] = holder

    def holder_gone(self, name: str) -> None:
        """A worker has ended: what was on its device falls back to the last image."""
        with self._lock:
            self._holders.pop(name, None)
            self._tell(on.HolderGone(time.monotonic(), name))
            for deployment in [d for d, holder in self._held_by.items() if holder == name]:
                self._to_follow.pop(deployment, None)
                self._followed(deployment)

    def register(
        self, deployment: str, holder: str, parts: Sequence[Part], *, warm: bool = True
    ) -> Registered:
        """Keep a deployment's state, or take over one whose worker has gone; RefusedError with the numbers if it cannot be."""
        with self._lock:
            known = self.catalogue.entries.get(deployment)
            entry = self.catalogue.entry_for(deployment, parts)
            if known is not None and known.on_device != entry.on_device:
                raise RefusedError(f"state of {deployment}: is known here with other tensors")
            entry = known or entry
            sizes = (entry.on_device.bytes, entry.stored.bytes)
            event = on.DeploymentRegistered(time.monotonic(), deployment, holder, *sizes, warm)
            said = self._tell(event)[0]
            if isinstance(said, do.Refuse):
                raise RefusedError(said.reason)
            assert isinstance(said, do.Admit)
            self._held_by[deployment] = holder
            self.catalogue.add(deployment, entry)
            return Registered(said.blank, self.catalogue.stretches(deployment), sizes[0])

    def ensure(
        self, deployment: str, tier: Tier, *, lease: bool = False, timeout_s: float = 600.0
    ) -> None:
        """Return when the state is at least on that tier; with `lease` it stays on the device until released."""
        entry = self.catalogue.entries.get(deployment)
        for other in entry.borrowed_from if entry else ():
            self.ensure(other, Tier.HOST, timeout_s=timeout_s)
        self._ask(
            lambda ticket: on.ResidencyAsked(time.monotonic(), ticket, deployment, tier, lease),
            timeout_s,
            f"{deployment} on the {tier.name.lower()} tier",
        )

    def release(self, deployment: str) -> None:
        with self._lock:
            self._tell(on.LeaseReleased(time.monotonic(), deployment))

    def seal(self, deployment: str) -> None:
        with self._lock:
            self.catalogue.sealed.add(deployment)

    def evict(self, deployment: str, tier: Tier = Tier.HOST, *, timeout_s: float = 600.0) -> None:
        """Return when the state is at most on that tier, whole; an operation that runs on it ends first."""
        self._ask(
            lambda ticket: on.EvictionAsked(time.monotonic(), ticket, deployment, tier),
            timeout_s,
            f"{deployment} off the tiers above {tier.name.lower()}",
        )

    def prefetch(self, deployments: Sequence[str]) -> None:
        """The scheduler's hint: what runs next, in order. Returns at once."""
        with self._lock:
            self._tell(on.NextHinted(time.monotonic(), tuple(deployments)))

    def prefetch_models(self, models: Sequence[str], holding: Sequence[str] = ()) -> None:
        """As `prefetch`, for the deployments of trainers' models, which are called MODEL@WORKER.

        Those of `holding` are in the middle of a phase, and are not pushed out by it.
        """

        def of(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(d for name in names for d in known if d.startswith(f"{name}@"))

        with self._lock:
            known = list(self.catalogue.entries)
            self._tell(on.NextHinted(time.monotonic(), of(models), of(holding)))

    def counts(self) -> dict[str, float]:
        """Of operations so far: how many found their state on the device, how many waited for it; and the loads before anybody asked."""
        book = self.book
        return {"found": book.found, "waited": book.waited, "early": book.early}

    def materialize(self, deployment: str, path: str, kinds: Sequence[str] | None = None) -> None:
        """Write a checkpoint (or with one of `kinds`, weights) from managed state, while other deployments run.

        A state that is on the device is saved to the host first.
        """
        self.evict(deployment, Tier.HOST)
        self.ensure(deployment, Tier.HOST)
        with self.reading(deployment):
            with self._lock:
                images, about = dict(self._images), self._abouts.get(deployment, {})
            write_checkpoint(Path(path), self.catalogue, deployment, images, about, kinds)

    @contextlib.contextmanager
    def reading(self, deployment: str) -> Iterator[HostImage]:
        """The host image, which nobody overwrites or drops meanwhile; NotFoundError where there is none."""
        with self._lock:
            image = self.image(deployment)
            self._tell(on.ReadingBegan(time.monotonic(), deployment))
        try:
            yield image
        finally:
            with self._lock:
                self._tell(on.ReadingEnded(time.monotonic(), deployment))

    @contextlib.contextmanager
    def reading_parts(self, deployment: str) -> Iterator[StoredParts]:
        """All parts as they are in host memory, those that it shares too; nobody overwrites or drops them meanwhile."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                entry = self.catalogue.entries.get(deployment)
                if entry is None:
                    raise NotFoundError(f"state of {deployment}: is not known here")
                names = (deployment, *sorted(entry.borrowed_from))
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
        with self._lock:
            return self.book.is_blank(deployment)

    def forget(self, deployment: str) -> None:
        """Nobody needs the state any more."""
        with self._lock:
            self.catalogue.check_unused(deployment)
            self._tell(on.DeploymentForgotten(time.monotonic(), deployment))

    def forget_when_unused(self, deployment: str) -> None:
        """As `forget`, but what others share of it stays until they go too."""
        with self._lock:
            if any(deployment in e.borrowed_from for e in self.catalogue.entries.values()):
                self._orphans.add(deployment)
            else:
                self.forget(deployment)

    def forget_abandoned(self, prefix: str) -> None:
        """Forget the deployments of that beginning whose workers have gone: somebody starts anew from a checkpoint."""
        with self._lock:
            for name in [n for n in self.catalogue.entries if n.startswith(prefix)]:
                if self._held_by.get(name) not in self._holders:
                    self.forget_when_unused(name)

    def held(self, prefix: str) -> str | None:
        """The state of that beginning that a worker has."""
        with self._lock:
            known = [name for name in self.catalogue.entries if name.startswith(prefix)]
            return next((n for n in known if self._held_by.get(n) in self._holders), None)

    def survivor(self, prefix: str, after: int, at_most: int) -> str | None:
        """The newest state of that beginning whose worker has gone, with operations in it beyond `after` and none beyond `at_most`."""
        with self._lock:
            found = [
                (int(self._abouts.get(name, {}).get("seq", -1)), name)
                for name in self.catalogue.entries
                if name.startswith(prefix) and self._held_by.get(name) not in self._holders
                if not self.book.is_blank(name)
            ]
            return max((one for one in found if after < one[0] <= at_most), default=(0, None))[1]

    def tiers(self) -> dict[str, Tier]:
        """Where every deployment's newest state is."""
        with self._lock:
            found = {name: self.book.tier(name) for name in self.catalogue.entries}
            return {name: tier for name, tier in found.items() if tier is not None}

    def about(self, deployment: str) -> About:
        """What was said of the state when it was last saved."""
        with self._lock:
            return self._abouts.get(deployment, {})

    def image(self, deployment: str) -> HostImage:
        """The host image; NotFoundError where it is not in host memory."""
        with self._lock:
            try:
                return self._images[deployment]
            except KeyError:
                raise NotFoundError(f"state of {deployment}: is not in host memory") from None

    @contextlib.contextmanager
    def taking(
        self, deployment: str, parts: Sequence[Part], about: About, *, warm: bool = True
    ) -> Iterator[dict[int, Bytes]]:
        """Take over a state that comes from another node, into host memory; its worker registers later.

        Inside the memory of the parts that are not here yet is to be filled, by their number among `parts`. If that fails, it is forgotten.
        """
        holder = f"arrival of {deployment}"
        self.register(deployment, holder, parts, warm=warm)
        try:
            self.ensure(deployment, Tier.HOST)
            with self.reading_parts(deployment) as stored:
                own = {part.key for part in self.catalogue.entries[deployment].stored.parts}
                asked = {part.key: number for number, part in enumerate(parts)}
                yield {
                    asked[part.key]: stored.stored[number]
                    for number, part in enumerate(stored.on_device)
                    if part.key in own
                }
            with self._lock:
                if deployment not in self.catalogue.entries:
                    raise UnavailableError(f"state of {deployment}: was forgotten as it came")
                self._abouts[deployment] = about
                self.catalogue.sealed.add(deployment)
                self._tell(on.DeploymentFilled(time.monotonic(), deployment))
                self._tell(on.HolderGone(time.monotonic(), holder))
        except BaseException:
            self.forget_when_unused(deployment)
            raise

    def close(self) -> None:
        """Give all host memory back. Holders must have ended."""
        self._disk_work.shutdown()
        self.disk.close()
        with self._lock:
            for image in (*self._images.values(), *self._spare):
                image.close()
            self._images.clear()
            self._spare.clear()

    def _ask(self, make: Callable[[int], on.StateEvent], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            ticket = next(self._tickets)
            self._tell(make(ticket))
            while ticket not in self._answers:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self._tell(on.WaitGivenUp(time.monotonic(), ticket))
                    self._answers.pop(ticket, None)
                    raise UnavailableError(
                        f"state: {what} was not to be had in {timeout_s:g} s; who runs there?"
                    )
                self._answered.wait(left_s)
            refused = self._answers.pop(ticket)
        if refused is not None:
            raise RefusedError(refused)

    def _tell(self, event: on.StateEvent) -> Sequence[do.StateCommand]:
        """Hand an event to the book and do what it says. The lock is held."""
        said = self.book.handle(event)
        for command in said:
            match command:
                case do.Answer(ticket, refused):
                    self._answers[ticket] = refused
                    self._answered.notify_all()
                case do.Move():
                    self._move(command)
                case do.Free(name, tier):
                    self._free(name, tier)
                case do.FellBack(name):
                    logger.warning("state of %s: back to its last image on the host", name)
                case do.Lost(name):
                    logger.warning("state of %s: lost with its worker; nothing was offloaded", name)
                    self._drop(name)
                case do.Admit() | do.Refuse():
                    pass
        return said

    def _move(self, move: do.Move) -> None:
        name, to = move.deployment, move.to
        device = to is Tier.DEVICE or (to is Tier.HOST and self.book.tier(name) is Tier.DEVICE)
        if not device:
            self._disk_work.submit(self._disk_move, move)
            return
        if move.follows and name not in self._arriving:
            self._to_follow[name] = move
            return
        holder = self._holders.get(self._held_by.get(name, ""))
        if holder is None:
            self._later(on.MoveFailed(time.monotonic(), name, to, f"{name}: its worker has gone"))
            return
        wanted = {name, *self.catalogue.entries[name].borrowed_from}
        images = {image: self._images[image] for image in wanted if image in self._images}
        arrival = None
        if move.follows:
            images[name], arrival = self._arriving[name]
        if images.keys() != wanted:
            missing = ", ".join(sorted(wanted - images.keys()))
            reason = f"{name}: {missing} is not in host memory"
            self._later(on.MoveFailed(time.monotonic(), name, to, reason))
            return
        about = self._abouts.get(name, {})
        held = self._held_by[name]
        if arrival is not None:
            self._following[name] = None
        holder.begin(
            HolderMove(name, to, move.blank, images, about, arrival),
            lambda ended: self._device_move_ended(name, to, held, ended),
        )

    def _device_move_ended(self, name: str, to: Tier, holder: str, ended: Ended) -> None:
        with self._lock:
            if self._held_by.get(name) != holder or holder not in self._holders:
                return  # of a worker that has gone since
            now_s = time.monotonic()
            if ended.failed is not None:
                self._tell(on.MoveFailed(now_s, name, to, ended.failed))
                self._followed(name)
                return
            self._followed(name)
            if to is Tier.HOST:
                self._abouts[name] = ended.about or {}
            entry = self.catalogue.entries.get(name)
            self._count(
                Tier.HOST if to is Tier.DEVICE else Tier.DEVICE,
                to,
                entry.stored.bytes if entry else 0,
            )
            self._tell(on.MoveDone(now_s, name, to))

    def _disk_move(self, move: do.Move) -> None:
        """On the disk's own thread: the lock is not held while bytes move."""
        name, to = move.deployment, move.to
        read: tuple[HostImage, Arrival] | None = None
        try:
            if to is Tier.HOST:
                read = self._from_disk(name, move.blank)
            else:
                with self._lock:
                    image, about = self._images[name], dict(self._abouts.get(name, {}))
                self.disk.write(name, image.pages, about)
        except Exception as error:  # noqa: BLE001  (a move fails, and whoever waits is told)
            said = (
                str(error)
                if isinstance(error, SlackwaterError)
                else f"{type(error).__name__}: {error}"
            )
            self._disk_move_failed(name, to, said)
            return
        with self._lock:
            if not move.blank:
                self._count(Tier(1 - to), to, self.catalogue.entries[name].stored.bytes)
            if read is not None:
                self._arriving.pop(name, None)
                self._images[name] = read[0]
            self._tell(on.MoveDone(time.monotonic(), name, to))
            if read is not None:  # and only now may a move that follows end
                read[1].reach(len(read[0].pages))

    def _spare_of(self, size: int) -> HostImage | None:
        """Pages of a state that left, if they are as many; those that would now pass the budget are given back."""
        with self._lock:
            fitting = next((i for i in self._spare if len(i.pages) == pages_for(size)), None)
            if fitting is not None:
                self._spare.remove(fitting)
                fitting.bytes = size
            room = self.book.budgets.host_bytes - self.book.used(Tier.HOST)
            while self._spare and sum(len(image.pages) for image in self._spare) > room:
                self._spare.pop(0).close()
            return fitting

    def _from_disk(self, name: str, blank: bool) -> tuple[HostImage, Arrival]:
        """The image as it is on disk; its last bytes are not yet said to have arrived."""
        size = self.catalogue.entries[name].stored.bytes
        image = self._spare_of(size) or HostImage.create(name, size)
        arrival = Arrival()
        if blank:
            image.pages.fill(0)
        else:
            self._read(name, image, arrival)
        return image, arrival

    def _read(self, name: str, image: HostImage, arrival: Arrival) -> None:
        def began(about: About) -> None:
            with self._lock:
                self._abouts[name] = about
                self._arriving[name] = (image, arrival)
                follower = self._to_follow.pop(name, None)
                if follower is not None:
                    self._move(follower)

        def reached(so_far: int) -> None:
            if so_far < len(image.pages):
                arrival.reach(so_far)

        try:
            self.disk.read(name, image.pages, began, reached)
        except BaseException as error:
            with self._lock:
                self._arriving.pop(name, None)
            arrival.fail(str(error))
            image.close()
            raise

    def _disk_move_failed(self, name: str, to: Tier, reason: str) -> None:
        """A move that follows one that failed ends first: it must not be begun again while it lasts."""
        with self._lock:
            now_s = time.monotonic()
            if self._to_follow.pop(name, None) is not None:
                self._tell(on.MoveFailed(now_s, name, Tier.DEVICE, reason))
            if name in self._following:
                self._following[name] = reason
            else:
                self._tell(on.MoveFailed(now_s, name, to, reason))

    def _followed(self, name: str) -> None:
        """A move that followed a reading has ended, or its worker has gone."""
        unread = self._following.pop(name, None)
        if unread is not None:
            for holder in self._holders.values():
                holder.drop_image(name)
            self._tell(on.MoveFailed(time.monotonic(), name, Tier.HOST, unread))

    def _later(self, event: on.StateEvent) -> None:
        """Events that come from doing a command wait until the command's own event is done."""

        def tell() -> None:
            with self._lock:
                self._tell(event)

        self._disk_work.submit(tell)

    def _free(self, name: str, tier: Tier) -> None:
        holder = self._holders.get(self._held_by.get(name, ""))
        match tier:
            case Tier.DEVICE:
                if holder is not None:
                    holder.free(name)
            case Tier.HOST:
                for each in self._holders.values():
                    each.drop_image(name)
                image = self._images.pop(name, None)
                if image is not None:
                    self._spare.append(image)
            case Tier.DISK:
                self.disk.drop(name)
        if self.book.tier(name) is None:
            self._drop(name)

    def _drop(self, name: str) -> None:
        image = self._images.pop(name, None)
        if image is not None:
            image.close()
        self.catalogue.remove(name)
        self._held_by.pop(name, None)
        self._abouts.pop(name, None)
        self._orphans.discard(name)
        for orphan in list(self._orphans):
            self.forget_when_unused(orphan)

    def _count(self, origin: Tier, to: Tier, size: int) -> None:
        self.moved_bytes[origin, to] = self.moved_bytes.get((origin, to), 0) + size
