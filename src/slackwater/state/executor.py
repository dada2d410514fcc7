"""Executes the residency controller's commands (PlexRL 4.5, 5.3) on holders, host images and disk.

A holder is a worker's part of the device: it copies between device memory and the images here.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slackwater.control.state import commands, events
from slackwater.control.state.residency_controller import ResidencyController
from slackwater.model.errors import RefusedError, UnavailableError, describe
from slackwater.model.residency import StateBudgets, Tier
from slackwater.state.catalogue import Catalogue
from slackwater.state.disk import DiskTier
from slackwater.state.image import HostImage, ImageArrivalProgress, pages_for
from slackwater.state.port import About, DeviceHolder, HolderMove, MoveOutcome

logger = logging.getLogger(__name__)


class ResidencyExecutor:
    """The controller and what its commands change, under one `lock`."""

    def __init__(self, budgets: StateBudgets, folder: Path) -> None:
        self.lock = threading.RLock()
        self.controller = ResidencyController(budgets)
        self.disk = DiskTier(folder)
        self.catalogue = Catalogue()
        self.holders: dict[str, DeviceHolder] = {}
        self.held_by: dict[str, str] = {}
        self.images: dict[str, HostImage] = {}
        self.abouts: dict[str, About] = {}
        self._answers: dict[int, str | None] = {}  # by ticket: why it was refused, or None
        self._answered = threading.Condition(self.lock)
        self._tickets = itertools.count(1)
        self.moved_bytes: dict[tuple[Tier, Tier], int] = {}  # by origin and target tier
        # Images that are being read from disk.
        self._arriving: dict[str, tuple[HostImage, ImageArrivalProgress]] = {}
        # Loads onto the device that follow a read from disk: those that wait for the read's first
        # byte, and those that run, with the read's error if it failed.
        self._waiting_followers: dict[str, commands.MoveTier] = {}
        self._follower_failures: dict[str, str | None] = {}
        self._spare: list[HostImage] = []  # images of states that left; their pages are populated
        self._disk_work = ThreadPoolExecutor(1, "state-disk-moves")

    def remove_holder(self, name: str) -> None:
        """A worker has ended: states on its device fall back to their last image."""
        with self.lock:
            self.holders.pop(name, None)
            self.tell(events.HolderGone(time.monotonic(), name))
            for deployment in [d for d, holder in self.held_by.items() if holder == name]:
                self._waiting_followers.pop(deployment, None)
                self._end_follower(deployment)

    def has_worker(self, deployment: str) -> bool:
        """Whether the worker that last had the state still runs."""
        return self.held_by.get(deployment) in self.holders

    def forget(self, deployment: str) -> None:
        """Delete the state; refused while other deployments share its image."""
        with self.lock:
            self.catalogue.check_unused(deployment)
            self.forget_when_unused(deployment)

    def forget_when_unused(self, deployment: str) -> None:
        """As `forget`, but parts that others share stay until those are forgotten too."""
        self.tell(events.DeploymentForgotten(time.monotonic(), deployment))

    def ask(self, make: Callable[[int], events.StateEvent], timeout_s: float, what: str) -> None:
        """Send an event with a new ticket, and wait until it is granted; `what` is for errors."""
        deadline_s = time.monotonic() + timeout_s
        with self.lock:
            ticket = next(self._tickets)
            self.tell(make(ticket))
            while ticket not in self._answers:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    self.tell(events.WaitGivenUp(time.monotonic(), ticket))
                    self._answers.pop(ticket, None)
                    raise UnavailableError(
                        f"state: {what} was not reached in {timeout_s:g} s; others use the memory"
                    )
                self._answered.wait(left_s)
            refused = self._answers.pop(ticket)
        if refused is not None:
            raise RefusedError(refused)

    def close(self) -> None:
        """Free all host memory after running moves have ended. Holders must have ended."""
        self._disk_work.shutdown()
        self.disk.close()
        with self.lock:
            for image in (*self.images.values(), *self._spare):
                image.close()
            self.images.clear()
            self._spare.clear()

    def tell(self, event: events.StateEvent) -> Sequence[commands.StateCommand]:
        """Pass an event to the controller and execute its commands."""
        with self.lock:
            found = self.controller.handle(event)
            for command in found:
                self._execute(command)
            return found

    def _execute(self, command: commands.StateCommand) -> None:
        match command:
            case commands.AnswerTicket(ticket, refused):
                self._answers[ticket] = refused
                self._answered.notify_all()
            case commands.MoveTier():
                self._move(command)
            case commands.FreeTier(name, tier):
                self._free(name, tier)
            case commands.Drop(name):
                self._drop(name)
            case commands.ReportFallback(name):
                logger.warning("state of %s: back to its last image on the host", name)
            case commands.ReportStateLost(name):
                logger.warning("state of %s: lost with its worker; nothing was offloaded", name)
            case commands.Admit() | commands.Refuse():
                pass

    def _move(self, move: commands.MoveTier) -> None:
        name, to = move.deployment, move.to
        device = to is Tier.DEVICE or (
            to is Tier.HOST and self.controller.tier(name) is Tier.DEVICE
        )
        if not device:
            self._disk_work.submit(self._disk_move, move)
            return
        if move.follows and name not in self._arriving:
            self._waiting_followers[name] = move
            return
        holder = self.holders.get(self.held_by.get(name, ""))
        if holder is None:
            self._tell_later(
                events.MoveFailed(time.monotonic(), name, to, f"{name}: its worker has gone")
            )
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
            self._tell_later(events.MoveFailed(time.monotonic(), name, to, reason))
            return
        about = self.abouts.get(name, {})
        held = self.held_by[name]
        if arrival is not None:
            self._follower_failures[name] = None
        fills = self._find_blank_images(shared)
        holder.begin(
            HolderMove(name, to, move.blank, images, about, arrival, fills),
            lambda ended: self._finish_device_move(name, to, held, ended),
        )

    def _find_blank_images(self, shared: Sequence[str]) -> frozenset[str]:
        """Images of frozen parts that are still empty: the first load fills them."""
        bases = [image for image in shared if image not in self.catalogue.entries]
        return frozenset(image for image in bases if self.controller.is_blank(image))

    def _finish_device_move(self, name: str, to: Tier, holder: str, ended: MoveOutcome) -> None:
        with self.lock:
            if self.held_by.get(name) != holder or holder not in self.holders:
                return  # the worker has ended meanwhile
            now_s = time.monotonic()
            if ended.failed is not None:
                self.tell(events.MoveFailed(now_s, name, to, ended.failed))
            self._end_follower(name)
            if ended.failed is not None:
                return
            if to is Tier.HOST:
                self.abouts[name] = ended.about or {}
            origin = Tier.HOST if to is Tier.DEVICE else Tier.DEVICE
            self._count(origin, to, self.catalogue.image_bytes(name))
            self.tell(events.MoveDone(now_s, name, to))

    def _disk_move(self, move: commands.MoveTier) -> None:
        """Runs on the disk's thread, without the lock while bytes move."""
        name, to = move.deployment, move.to
        read: tuple[HostImage, ImageArrivalProgress] | None = None
        try:
            if to is Tier.HOST:
                read = self._read_image(name, move.blank)
            else:
                with self.lock:
                    image, about = self.images[name], dict(self.abouts.get(name, {}))
                self.disk.write(name, image.pages, about)
        except Exception as error:  # noqa: BLE001  (a move fails, and whoever waits is told)
            self._disk_move_failed(name, to, describe(error))
            return
        with self.lock:
            if not move.blank:
                self._count(Tier(1 - to), to, self.catalogue.image_bytes(name))
            if read is not None:
                self._arriving.pop(name, None)
                self.images[name] = read[0]
            self.tell(events.MoveDone(time.monotonic(), name, to))
            if read is not None:  # last: only now may a load that follows the read end
                read[1].reach(len(read[0].pages))

    def _take_spare(self, size: int) -> HostImage | None:
        """A spare image of that size, if there is one; frees spare images beyond the budget."""
        with self.lock:
            fitting = next((i for i in self._spare if len(i.pages) == pages_for(size)), None)
            if fitting is not None:
                self._spare.remove(fitting)
                fitting.bytes = size
            room = self.controller.budgets.host_bytes - self.controller.bytes_in_use(Tier.HOST)
            while self._spare and sum(len(image.pages) for image in self._spare) > room:
                self._spare.pop(0).close()
            return fitting

    def _read_image(self, name: str, blank: bool) -> tuple[HostImage, ImageArrivalProgress]:
        """Read an image from disk; the caller reports the arrival of its last bytes."""
        size = self.catalogue.image_bytes(name)
        image = self._take_spare(size) or HostImage.create(name, size)
        arrival = ImageArrivalProgress()
        if blank:
            image.pages.fill(0)
        else:
            self._read(name, image, arrival)
        return image, arrival

    def _read(self, name: str, image: HostImage, arrival: ImageArrivalProgress) -> None:
        def on_begin(about: About) -> None:
            with self.lock:
                self.abouts[name] = about
                self._arriving[name] = (image, arrival)
                follower = self._waiting_followers.pop(name, None)
                if follower is not None:
                    self._move(follower)

        def report_progress(so_far: int) -> None:
            if so_far < len(image.pages):
                arrival.reach(so_far)

        try:
            self.disk.read(name, image.pages, on_begin, report_progress)
        except BaseException as error:
            with self.lock:
                self._arriving.pop(name, None)
            arrival.fail(str(error))
            image.close()
            raise

    def _disk_move_failed(self, name: str, to: Tier, reason: str) -> None:
        """Report a failed disk move. A load that follows it is failed first, so that the controller
        does not start it again while this move lasts.
        """
        with self.lock:
            now_s = time.monotonic()
            if self._waiting_followers.pop(name, None) is not None:
                self.tell(events.MoveFailed(now_s, name, Tier.DEVICE, reason))
            if name in self._follower_failures:
                self._follower_failures[name] = reason
            else:
                self.tell(events.MoveFailed(now_s, name, to, reason))

    def _end_follower(self, name: str) -> None:
        """A load that followed a read has ended, or its worker has: report the read's failure."""
        unread = self._follower_failures.pop(name, None)
        if unread is not None:
            for holder in self.holders.values():
                holder.drop_image(name)
            self.tell(events.MoveFailed(time.monotonic(), name, Tier.HOST, unread))

    def _tell_later(self, event: events.StateEvent) -> None:
        """Report an event after the current one, whose commands are being executed."""
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
