"""A worker's part of the device tier: binds owners to device memory and moves their bytes.

Loads and saves have a thread (and on CUDA a stream) each, so that one state is saved while another
is loaded, in parallel with the running operation. Blocks are reused, so that a switch waits for no
allocator; the controller enforces the budget.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from slackwater.model.errors import RefusedError, describe
from slackwater.model.residency import ImageRange, StateKey, StoredPart, Tier
from slackwater.policy.state.layout import ImageLayout, align_up
from slackwater.state.catalogue import Catalogue
from slackwater.state.disk import PIECE
from slackwater.state.image import HostImage
from slackwater.state.port import About, HolderMove, MoveOutcome

if TYPE_CHECKING:
    from slackwater.state.client import StateClient
    from slackwater.state.manager import StateManager

_ROUND = 2 << 20
_WASTE = 1.25


@dataclass(frozen=True, slots=True)
class ByteRun:
    """A run of bytes, its offset on the device and its offset in an image."""

    image: HostImage
    on_device: int
    on_host: int
    bytes: int


def host_bytes(image: HostImage) -> Tensor:
    """An image as a tensor over the same memory."""
    return torch.from_numpy(image.data)


class CpuCopies:
    """Copies between a device's memory, here the host's, and images. When a call returns, the copy
    is complete.
    """

    def load(self, region: Tensor, runs: Sequence[ByteRun], blanks: Sequence[Tensor] = ()) -> None:
        """Zero the blanks, then fill the runs."""
        for blank in blanks:
            blank.zero_()
        for run in runs:
            host = host_bytes(run.image)[run.on_host : run.on_host + run.bytes]
            region[run.on_device : run.on_device + run.bytes].copy_(host)

    def fence(self) -> Any:
        """A mark of the work queued so far; `save` waits for that work and no later work."""
        return None

    def save(self, region: Tensor, runs: Sequence[ByteRun], after: Any) -> None:
        for run in runs:
            device = region[run.on_device : run.on_device + run.bytes]
            host_bytes(run.image)[run.on_host : run.on_host + run.bytes].copy_(device)

    def forget(self, image: HostImage) -> None:
        del image


class CudaCopies(CpuCopies):
    """Pins images at first use; loads and saves have separate streams from the computation."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self._in: Any = torch.cuda.Stream(self.device)
        self._out: Any = torch.cuda.Stream(self.device)
        self._pinned: dict[int, Tensor] = {}

    def pin(self, image: HostImage) -> Tensor:
        """The image's memory, pinned in this process; the manager owns the pages."""
        known = self._pinned.get(id(image))
        if known is None:
            whole = torch.from_numpy(image.pages)
            status: Any = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)
            if int(status):
                raise RefusedError(
                    f"host memory: {whole.nbytes} bytes cannot be pinned (CUDA error "
                    f"{int(status)}); lower the host budget"
                )
            known = self._pinned[id(image)] = whole
        return known

    def load(self, region: Tensor, runs: Sequence[ByteRun], blanks: Sequence[Tensor] = ()) -> None:
        with torch.cuda.stream(self._in):
            for blank in blanks:
                blank.zero_()
            for run in runs:
                host = self.pin(run.image)[run.on_host : run.on_host + run.bytes]
                region[run.on_device : run.on_device + run.bytes].copy_(host, non_blocking=True)
        self._in.synchronize()

    def fence(self) -> Any:
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def save(self, region: Tensor, runs: Sequence[ByteRun], after: Any) -> None:
        with torch.cuda.stream(self._out):
            if after is not None:
                self._out.wait_event(after)
            for run in runs:
                host = self.pin(run.image)[run.on_host : run.on_host + run.bytes]
                host.copy_(region[run.on_device : run.on_device + run.bytes], non_blocking=True)
        self._out.synchronize()

    def forget(self, image: HostImage) -> None:
        """Unpin an image before its memory is freed."""
        whole = self._pinned.pop(id(image), None)
        if whole is not None:
            torch.cuda.cudart().cudaHostUnregister(whole.data_ptr())


def copies_for(device: str) -> CpuCopies:
    return CudaCopies(device) if device.startswith("cuda") else CpuCopies()


class DeviceBlockPool:
    """Allocates blocks and keeps idle ones for reuse, within the budget if live ones allow it."""

    def __init__(self, budget: int, device: str = "cpu") -> None:
        self._budget = budget
        self._device = device
        self._idle: list[Tensor] = []
        self._live = 0

    def take(self, size: int) -> Tensor:
        """A block of at least that many bytes, with undefined content."""
        room = align_up(max(size, 1), _ROUND)
        fitting = [b for b in self._idle if room <= b.nbytes <= max(_WASTE * room, room)]
        if fitting:
            block = min(fitting, key=lambda b: b.nbytes)
            self._idle = [b for b in self._idle if b is not block]
        else:
            while self._idle and self._live + self.idle_bytes + room > self._budget:
                self._idle.pop(0)
            block = torch.empty(room, dtype=torch.uint8, device=self._device)
        self._live += block.nbytes
        return block

    def give(self, block: Tensor) -> None:
        self._live -= block.nbytes
        self._idle.append(block)
        while self._idle and self._live + self.idle_bytes > self._budget:
            self._idle.pop(0)

    @property
    def idle_bytes(self) -> int:
        return sum(block.nbytes for block in self._idle)


class DeploymentOwner(Protocol):
    """Computes on a deployment's tensors, such as a trainer."""

    def bind(self, tensors: Mapping[StateKey, Tensor], about: About) -> None:
        """The tensors are on the device: flat, each with its key's elements.

        `about` is what `unbind` returned last. If it is empty, the tensors are zeros, except frozen
        ones that another deployment filled. The owner fills the others; frozen parts are final when
        this returns.
        """

    def unbind(self) -> About:
        """Release the tensors; returns the rest of the state, such as counters."""


@dataclass(slots=True)
class _Tenant:
    owner: DeploymentOwner
    layout: ImageLayout
    stretches: tuple[ImageRange, ...]
    block: Tensor | None = None
    fence: Any = None
    images: dict[str, HostImage] = field(default_factory=dict)


class DeviceTier:
    """One holder of a manager, which is in this process or behind a client. Operations run inside
    `use`; the manager decides everything else.
    """

    def __init__(
        self, port: "StateManager | StateClient", name: str, budget: int, device: str = "cpu"
    ) -> None:
        self.name = name
        self._port = port
        self._blocks = DeviceBlockPool(budget, device)
        self._copies = copies_for(device)
        self._tenants: dict[str, _Tenant] = {}
        self._lock = threading.Lock()
        self._orders: dict[
            bool, queue.SimpleQueue[tuple[HolderMove, Callable[[MoveOutcome], None]] | None]
        ] = {up: queue.SimpleQueue() for up in (True, False)}
        self._threads = [
            threading.Thread(target=self._run, args=(up,), daemon=True, name=f"state-{name}-{up}")
            for up in (True, False)
        ]
        for thread in self._threads:
            thread.start()

    def add(
        self,
        deployment: str,
        parts: Sequence[StoredPart],
        owner: DeploymentOwner,
        *,
        warm: bool = True,
    ) -> bool:
        """Register a deployment. True: it has no content yet, and is loaded as zeros."""
        layout = Catalogue().entry_for(deployment, parts).on_device
        with self._lock:
            self._tenants[deployment] = tenant = _Tenant(owner, layout, ())
        try:
            registered = self._port.register(deployment, self.name, parts, warm=warm)
        except BaseException:
            with self._lock:
                del self._tenants[deployment]
            raise
        tenant.stretches = registered.stretches
        return registered.blank

    @contextlib.contextmanager
    def use(self, deployment: str, timeout_s: float = 600.0) -> Iterator[None]:
        """Load and bind the deployment, and keep it on the device inside the context."""
        self._port.ensure(deployment, Tier.DEVICE, lease=True, timeout_s=timeout_s)
        try:
            yield
        finally:
            self._tenants[deployment].fence = self._copies.fence()
            self._port.release(deployment)

    def evict(self, deployment: str, tier: Tier = Tier.HOST) -> None:
        self._port.evict(deployment, tier)

    def forget(self, deployment: str) -> None:
        self._port.forget(deployment)
        with self._lock:
            self._tenants.pop(deployment, None)

    def close(self) -> None:
        """End the threads after their queued moves."""
        for orders in self._orders.values():
            orders.put(None)
        for thread in self._threads:
            thread.join()

    def begin(self, move: HolderMove, on_end: Callable[[MoveOutcome], None]) -> None:
        self._orders[move.to is Tier.DEVICE].put((move, on_end))

    def free(self, deployment: str) -> None:
        with self._lock:
            tenant = self._tenants.pop(deployment, None)
        if tenant is not None and tenant.block is not None:
            tenant.owner.unbind()
            self._blocks.give(tenant.block)

    def drop_image(self, image: str) -> None:
        with self._lock:
            tenants = list(self._tenants.values())
        for tenant in tenants:
            found = tenant.images.pop(image, None)
            if found is not None:
                self._copies.forget(found)

    def _run(self, up: bool) -> None:
        while (order := self._orders[up].get()) is not None:
            move, on_end = order
            try:
                about = self._load(move) if up else self._save(move)
            except Exception as error:  # noqa: BLE001  (a move fails, not the worker: the state stays where it is)
                on_end(MoveOutcome(failed=describe(error)))
            else:
                on_end(MoveOutcome(about))

    def _load(self, move: HolderMove) -> About | None:
        tenant = self._tenants[move.deployment]
        tenant.images |= move.images
        with self._lock:
            block = self._blocks.take(tenant.layout.bytes)
        try:
            unwritten = move.fills | ({move.deployment} if move.blank else set())
            empty = move.about.get("empty_kinds", ())
            stored = [s for s in tenant.stretches if s.image not in unwritten]
            runs = [s for s in stored if s.kind not in empty]
            gaps = _gaps(block, runs, tenant.layout.bytes)
            arriving = None if move.arrival is None else move.deployment
            coming = [s for s in runs if s.image == arriving]
            there = [s for s in runs if s.image != arriving]
            self._copies.load(block, _runs(there, move.images), gaps)
            for run in _pieces(_runs(coming, move.images)):
                assert move.arrival is not None
                move.arrival.wait(run.on_host + run.bytes)
                self._copies.load(block, [run])
            tenant.block = block
            tenant.owner.bind(_tensors(block, tenant.layout), move.about)
            frozen = [s for s in tenant.stretches if s.image in move.fills]
            if frozen:  # they never change: this is their only save
                self._copies.save(block, _runs(frozen, move.images), self._copies.fence())
        except BaseException:
            tenant.block = None
            with self._lock:
                self._blocks.give(block)
            raise
        return None

    def _save(self, move: HolderMove) -> About:
        tenant = self._tenants[move.deployment]
        assert tenant.block is not None
        about = tenant.owner.unbind()
        empty = about.get("empty_kinds", ())
        runs = [s for s in tenant.stretches if s.writes and s.kind not in empty]
        self._copies.save(tenant.block, _runs(runs, move.images), tenant.fence)
        with self._lock:
            self._blocks.give(tenant.block)
        tenant.block = None
        return about


def _runs(stretches: Sequence[ImageRange], images: Mapping[str, HostImage]) -> list[ByteRun]:
    return [ByteRun(images[s.image], s.on_device, s.on_host, s.bytes) for s in stretches]


def _pieces(runs: Sequence[ByteRun]) -> Iterator[ByteRun]:
    """The runs in the order in which the disk delivers them, cut at the disk's pieces."""
    for run in sorted(runs, key=lambda r: r.on_host):
        at, end = run.on_host, run.on_host + run.bytes
        while at < end:
            stop = min(end, (at // PIECE + 1) * PIECE)
            yield ByteRun(run.image, run.on_device + at - run.on_host, at, stop - at)
            at = stop


def _gaps(block: Tensor, runs: Sequence[ImageRange], size: int) -> list[Tensor]:
    """The parts of the block that no run fills: they are zeroed."""
    gaps, at = list[Tensor](), 0
    for stretch in sorted(runs, key=lambda s: s.on_device):
        gaps.append(block[at : stretch.on_device])
        at = stretch.on_device + stretch.bytes
    gaps.append(block[at:size])
    return [gap for gap in gaps if len(gap)]


def _tensors(block: Tensor, layout: ImageLayout) -> dict[StateKey, Tensor]:
    dtypes: dict[str, Any] = {}
    found: dict[StateKey, Tensor] = {}
    for part, start in zip(layout.parts, layout.offsets, strict=True):
        dtype = dtypes.setdefault(part.dtype, getattr(torch, part.dtype))
        found[part.key] = block[start : start + part.bytes].view(dtype)
    return found
