"""Publishes versions in a thread; the trainer waits only for the copy.

The copy stays on the trainer's device if it fits, and leaves it on its own streams.
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slackwater.model.errors import SlackwaterError
from slackwater.policy.weights.pull_route import is_worth_relaying
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.publisher import RelayPublisher
from slackwater.wire import messages
from slackwater.worker.files import WeightStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """A version to publish; `stock`: other nodes may pull it from this node's relay."""

    op: int
    model: str
    version: str
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]
    durable: bool
    stock: bool


class VersionPublisher:
    """Publishes versions one after the other; its thread calls `report` and `make_failure`.

    One version may wait while another is written; a third blocks the caller, which bounds memory.
    """

    def __init__(
        self,
        store: WeightStore,
        report: Callable[[messages.Message], None],
        make_failure: Callable[[int, Exception], messages.OpFailed],
        *,
        stocker: RelayPublisher | None = None,
        node: str = "",
    ) -> None:
        self._store, self._report, self._make_failure = store, report, make_failure
        self._stocker, self._node = stocker, node
        self._jobs: queue.Queue[Publication | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name="publishing", daemon=True)
        self._thread.start()

    def begin(self, job: Publication) -> None:
        """Copy the tensors, report `PublishDetached`, return; `OpDone` or `OpFailed` follows."""
        began_s = time.perf_counter()
        copy = replace(job, tensors=_copy_tensors(job.tensors))
        self._report(messages.PublishDetached(job.op, time.perf_counter() - began_s))
        self._jobs.put(copy)

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
                with _own_stream(job.tensors):
                    if job.stock:
                        self._stock(job)
                    self._store.publish(job.version, job.tensors, job.meta, durable=job.durable)
            except Exception as error:  # noqa: BLE001  (the thread's edge: one publish fails, not all)
                self._report(self._make_failure(job.op, error))
            else:
                self._report(messages.OpDone(job.op, time.perf_counter() - began_s))
            self._jobs.task_done()

    def _stock(self, job: Publication) -> None:
        """Offer a large version on this node's relay; a failure only costs speed."""
        size = sum(tensor.nbytes for tensor in job.tensors.values())
        if self._stocker is None or not is_worth_relaying(size):
            return
        try:
            host_copy = host_version(job.version, job.tensors, job.meta, own=True)
            manifest = self._stocker.stock(job.model, host_copy)
        except SlackwaterError as error:
            logger.warning("version not offered on the relay version=%s: %s", job.version, error)
            return
        sizes = {base: manifest.bytes_of(base) for base in manifest.sizes}
        self._report(messages.VersionStocked(job.version, self._node, sizes))


def _copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A complete private copy: on the tensors' device, or on the host if memory is short."""
    try:
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    except torch.OutOfMemoryError:
        return {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    if any(copy.is_cuda for copy in copies.values()):
        torch.cuda.current_stream().synchronize()
    return copies


def _own_stream(tensors: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """A CUDA stream for this thread, so its copies do not queue behind the trainer's next pass."""
    if not any(tensor.is_cuda for tensor in tensors.values()):
        return contextlib.nullcontext()
    new_stream: Any = torch.cuda.Stream
    use_stream: Any = torch.cuda.stream
    stream: contextlib.AbstractContextManager[Any] = use_stream(new_stream())
    return stream
