"""Publishes versions in a thread; the trainer waits only for the copy.

The copy stays on the trainer's device if there is room and leaves it on streams of its own.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import SlackwaterError
from slackwater.policy.weights.pull_route import worth_a_relay
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.publisher import RelayStocker
from slackwater.wire import messages
from slackwater.worker.files import WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    op: int
    line: str
    version: str
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    durable: bool
    stock: bool


class VersionPublisher:
    """Publishes one version after the other; calls `tell` and `failed` from its thread, in order.

    One version may wait while another is written; a third blocks the caller, which bounds memory.
    """

    def __init__(
        self,
        store: WeightStore,
        tell: Callable[[messages.Message], None],
        failed: Callable[[int, Exception], messages.OpFailed],
        *,
        stocker: RelayStocker | None = None,
        node: str = "",
    ) -> None:
        self._store, self._tell, self._failed = store, tell, failed
        self._stocker, self._node = stocker, node
        self._jobs: queue.Queue[_Job | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name="publishing", daemon=True)
        self._thread.start()

    def begin(
        self,
        op: int,
        line: str,
        version: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        durable: bool,
        stock: bool,
    ) -> None:
        """Copy the tensors, tell `PublishDetached`, and return; `OpDone` or `OpFailed` follows.

        `stock`: other nodes may pull the version from this node's relay.
        """
        began_s = time.perf_counter()
        job = _Job(op, line, version, _own(tensors), meta, durable, stock)
        self._tell(messages.PublishDetached(op, time.perf_counter() - began_s))
        self._jobs.put(job)

    @property
    def busy(self) -> bool:
        """Whether a version waits or is being written."""
        return self._jobs.unfinished_tasks > 0

    def close(self) -> None:
        """Finish the current work and stop."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            began_s = time.perf_counter()
            try:
                with _beside_the_trainer(job.tensors):
                    if job.stock:
                        self._stock(job)
                    self._store.publish(job.version, job.tensors, job.meta, durable=job.durable)
            except Exception as error:  # noqa: BLE001  (the thread's edge: one publish fails, not all)
                self._tell(self._failed(job.op, error))
            else:
                self._tell(messages.OpDone(job.op, time.perf_counter() - began_s))
            self._jobs.task_done()

    def _stock(self, job: _Job) -> None:
        """Onto the relay of this node, where that pays; its failure costs speed alone."""
        size = sum(tensor.nbytes for tensor in job.tensors.values())
        if self._stocker is None or not worth_a_relay(size):
            return
        try:
            on_host = host_version(job.version, job.tensors, job.meta, own=True)
            manifest = self._stocker.stock(job.line, on_host)
        except SlackwaterError as error:
            logger.warning("relay left out version=%s: %s", job.version, error)
            return
        sizes = {base: manifest.bytes_of(base) for base in manifest.sizes}
        self._tell(messages.VersionStocked(job.version, self._node, sizes))


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A complete private copy: on the tensors' device, or on the host if memory is short."""
    try:
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    except torch.OutOfMemoryError:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    if any(copy.is_cuda for copy in copies.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _beside_the_trainer(tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """What this thread asks of the device does not queue behind the trainer's next pass."""
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return contextlib.nullcontext()
    new_stream: Any = torch.cuda.Stream
    beside: Any = torch.cuda.stream
    stream: contextlib.AbstractContextManager[Any] = beside(new_stream())
    return stream
