"""The executor of the residency controller (PlexRL 4.5, 5.3): holders, host images, the disk.

Holders are workers' parts of the device: they copy between device memory and the images here.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slackwater.control.state import commands as do
from slackwater.control.state import events as on
from slackwater.control.state.residency_controller import ResidencyController
from slackwater.model.errors import RefusedError, SlackwaterError, UnavailableError
from slackwater.model.residency import StateBudgets, Tier
from slackwater.state.catalogue import Catalogue
from slackwater.state.disk import DiskTier
from slackwater.state.image import HostImage, ImageArrivalProgress, pages_for
from slackwater.state.port import About, DeviceHolder, HolderMove, MoveOutcome

logger = logging.getLogger(__name__)


class StateBody:
    """Callers hold `lock`, except for `ask` and `close`, which wait for others."""

    def __init__(self, budgets: StateBudgets, folder: Path) -> None:
        self.lock = threading.RLock()
        self.book = ResidencyController(budgets)
        self.disk = DiskTier(folder)
        self.catalogue = Catalogue()
        self.holders: dict[str, DeviceHolder] = {}
        self.held_by: dict[str, str] = {}
        self.images: dict[str, HostImage] = {}
        self.abouts: dict[str, About] = {}
        self._answers: dict[int, str | None] = {}  # by ticket: why it was refused, or None
        self._answered = threading.Condition(self.lock)
        self._tickets = itertools.count(1)
        self.moved_bytes: dict[tuple[Tier, Tier], int] = {}
        # being read from disk
        self._arriving: dict[str, tuple[HostImage, ImageArrivalProgress]] = {}
        self._to_follow: dict[str, do.MoveTier] = {}  # wait for the first byte of what they follow
        self._following: dict[str, str | None] = {}  # with what became of the reading, if it failed
        self._spare: list[HostImage] = []  # of states that left: their pages are made already
        self._disk_work = ThreadPoolExecutor(1, "state-disk-moves")

    def holder_gone(self, name: str) -> None:
        """A worker has ended: what was on its device falls back to the last image."""
        self.holders.pop(name, None)
        self.tell(on.HolderGone(time.monotonic(), name))
        for deployment in [d for d, holder in self.held_by.items() if holder == name]:
            self._to_follow.pop(deployment, None)
            self._end_following(deployment)

    def has_worker(self, deployment: str) -> bool:
        """Whether the worker that last had the state is still there."""
        return self.held_by.get(deployment) in self.holders

    def forget(self, deployment: str) -> None:
        """Nobody needs the state any more."""
        self.catalogue.check_unused(deployment)
        self.forget_when_unused(deployment)

    def forget_when_unused(self, deployment: str) -> None:
        """As `forget`, but what others share of it stays until they go too."""
        self.tell(on.DeploymentForgotten(time.monotonic(), deployment))

    def ask(self, make: Callable[[int], on.StateEvent], timeout_s: float, what: str) -> None:
        """Return when the event, made with a ticket, is granted; `what` names it in a timeout."""
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            ticket = next(self._tickets)
            self.tell(make(ticket))
            while ticket not in self._answers:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self.tell(on.WaitGivenUp(time.monotonic(), ticket))
                    self._answers.pop(ticket, None)
                    raise UnavailableError(
                        f"state: {what} was not reached in {timeout_s:g} s; others hold the room"
                    )
                self._answered.wait(left_s)
            refused = self._answers.pop(ticket)
        if refused is not None:
            raise RefusedError(refused)

    def close(self) -> None:
        """Free all host memory once begun moves are done. Holders must have ended."""
        self._disk_work.shutdown()
        self.disk.close()
        with self.lock:
            for image in (*self.images.values(), *self._spare):
                image.close()
            self.images.clear()
            self._spare.clear()

    def tell(self, event: on.StateEvent) -> Sequence[do.StateCommand]:
        """Hand an event to the book and do what it says."""
        with self.lock:
            return self._tell(event)

    def _tell(self, event: on.StateEvent) -> Sequence[do.StateCommand]:
        said = self.book.handle(event)
        for command in said:
            match command:
                case do.AnswerTicket(ticket, refused):
                    self._answers[ticket] = refused
                    self._answered.notify_all()
                case do.MoveTier():
                    self._move(command)
                case do.FreeTier(name, tier):
                    self._free(name, tier)
                case do.Drop(name):
                    self._drop(name)
                case do.ReportFallback(name):
                    logger.warning("state of %s: back to its last image on the host", name)
                case do.ReportStateLost(name):
                    logger.warning("state of %s: lost with its worker; nothing was offloaded", name)
                case do.Admit() | do.Refuse():
                    pass
        return said

    def _move(self, move: do.MoveTier) -> None:
        name, to = move.deployment, move.to
        device = to is Tier.DEVICE or (to is Tier.HOST and self.book.tier(name) is Tier.DEVICE)
        if not device:
            self._disk_work.submit(self._disk_move, move)
            return
        if move.follows and name not in self._arriving:
            self._to_follow[name] = move
            return
        holder = self.holders.get(self.held_by.get(name, ""))
        if holder is None:
            self._later(on.MoveFailed(time.monotonic(), name, to, f"{name}: its worker has gone"))
            return
        shared = self.catalogue.entries[name].shared if to is Tier.DEVICE else ()
        wanted = {name, *shared}
        images = {image: self.images[image] for image in wanted if image in self.images}
        arrival = None
        if move.follows:
            images[name], arrival = self._arriving[name]
        if images.keys() != wanted:
            missing = ", ".join(sorted(wanted - images.keys()))
            reason = f"{name}: {missing} is not in host memory"
            self._later(on.MoveFailed(time.monotonic(), name, to, reason))
            return
        about = self.abouts.get(name, {})
        held = self.held_by[name]
        if arrival is not None:
            self._following[name] = None
        holder.begin(
            HolderMove(name, to, move.blank, images, about, arrival, self._unfilled(shared)),
            lambda ended: self._device_move_ended(name, to, held, ended),
        )

    def _unfilled(self, shared: Sequence[str]) -> frozenset[str]:
        """Images of frozen parts that nobody has brought yet: the first to load fills them."""
        bases = [image for image in shared if image not in self.catalogue.entries]
        return frozenset(image for image in bases if self.book.is_blank(image))

    def _device_move_ended(self, name: str, to: Tier, holder: str, ended: MoveOutcome) -> None:
        with self.lock:
            if self.held_by.get(name) != holder or holder not in self.holders:
                return  # of a worker that has gone since
            now_s = time.monotonic()
            if ended.failed is not None:
                self.tell(on.MoveFailed(now_s, name, to, ended.failed))
                self._end_following(name)
                return
            self._end_following(name)
            if to is Tier.HOST:
                self.abouts[name] = ended.about or {}
            origin = Tier.HOST if to is Tier.DEVICE else Tier.DEVICE
            self._count(origin, to, self.catalogue.image_bytes(name))
            self.tell(on.MoveDone(now_s, name, to))

    def _disk_move(self, move: do.MoveTier) -> None:
        """On the disk's own thread: the lock is not held while bytes move."""
        name, to = move.deployment, move.to
        read: tuple[HostImage, ImageArrivalProgress] | None = None
        try:
            if to is Tier.HOST:
                read = self._from_disk(name, move.blank)
            else:
                with self.lock:
                    image, about = self.images[name], dict(self.abouts.get(name, {}))
                self.disk.write(name, image.pages, about)
        except Exception as error:  # noqa: BLE001  (a move fails, and whoever waits is told)
            said = (
                str(error)
                if isinstance(error, SlackwaterError)
                else f"{type(error).__name__}: {error}"
            )
            self._disk_move_failed(name, to, said)
            return
        with self.lock:
            if not move.blank:
                self._count(Tier(1 - to), to, self.catalogue.image_bytes(name))
            if read is not None:
                self._arriving.pop(name, None)
                self.images[name] = read[0]
            self.tell(on.MoveDone(time.monotonic(), name, to))
            if read is not None:  # and only now may a move that follows end
                read[1].reach(len(read[0].pages))

    def _spare_of(self, size: int) -> HostImage | None:
        """Pages of a state that left, if they fit; those beyond the budget are freed."""
        with self.lock:
            fitting = next((i for i in self._spare if len(i.pages) == pages_for(size)), None)
            if fitting is not None:
                self._spare.remove(fitting)
                fitting.bytes = size
            room = self.book.budgets.host_bytes - self.book.used(Tier.HOST)
            while self._spare and sum(len(image.pages) for image in self._spare) > room:
                self._spare.pop(0).close()
            return fitting

    def _from_disk(self, name: str, blank: bool) -> tuple[HostImage, ImageArrivalProgress]:
        """The image as it is on disk; its last bytes are not yet said to have arrived."""
        size = self.catalogue.image_bytes(name)
        image = self._spare_of(size) or HostImage.create(name, size)
        arrival = ImageArrivalProgress()
        if blank:
            image.pages.fill(0)
        else:
            self._read(name, image, arrival)
        return image, arrival

    def _read(self, name: str, image: HostImage, arrival: ImageArrivalProgress) -> None:
        def began(about: About) -> None:
            with self.lock:
                self.abouts[name] = about
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
            with self.lock:
                self._arriving.pop(name, None)
            arrival.fail(str(error))
            image.close()
            raise

    def _disk_move_failed(self, name: str, to: Tier, reason: str) -> None:
        """End a following move first: it must not begin again while this one lasts."""
        with self.lock:
            now_s = time.monotonic()
            if self._to_follow.pop(name, None) is not None:
                self.tell(on.MoveFailed(now_s, name, Tier.DEVICE, reason))
            if name in self._following:
                self._following[name] = reason
            else:
                self.tell(on.MoveFailed(now_s, name, to, reason))

    def _end_following(self, name: str) -> None:
        """A move that followed a reading has ended, or its worker has gone."""
        unread = self._following.pop(name, None)
        if unread is not None:
            for holder in self.holders.values():
                holder.drop_image(name)
            self.tell(on.MoveFailed(time.monotonic(), name, Tier.HOST, unread))

    def _later(self, event: on.StateEvent) -> None:
        """Events that come from doing a command wait until the command's own event is done."""
        self._disk_work.submit(self.tell, event)

    def _free(self, name: str, tier: Tier) -> None:
        holder = self.holders.get(self.held_by.get(name, ""))
        match tier:
            case Tier.DEVICE:
                if holder is not None:
                    holder.free(name)
            case Tier.HOST:
                for each in self.holders.values():
                    each.drop_image(name)
                image = self.images.pop(name, None)
                if image is not None:
                    self._spare.append(image)
            case Tier.DISK:
                self.disk.drop(name)

    def _drop(self, name: str) -> None:
        image = self.images.pop(name, None)
        if image is not None:
            image.close()
        self.catalogue.remove(name)
        self.held_by.pop(name, None)
        self.abouts.pop(name, None)

    def _count(self, origin: Tier, to: Tier, size: int) -> None:
        self.moved_bytes[origin, to] = self.moved_bytes.get((origin, to), 0) + size
