"""A payload that is being brought in a thread, and its buckets as they arrive."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slackwater.model.errors import NotFoundError, SlackwaterError, UnavailableError
from slackwater.model.payload import Payload
from slackwater.weights.relay.agent import Agent, Memory, Seen
from slackwater.weights.relay.bucket_store import BucketKey
from slackwater.weights.relay.manifest import Manifest

_LOOK_S = 0.5


class PayloadReceipt:
    """Brings one payload beside the caller, who works on each bucket as soon as it is complete."""

    def __init__(
        self,
        agent: Agent,
        payload: Payload,
        manifest: Manifest,
        deadline_s: float,
        memory: Memory | None = None,
        seen: Seen | None = None,
    ) -> None:
        self._agent, self._payload, self._manifest = agent, payload, manifest
        self._memory, self._seen = memory, seen
        self._deadline_s = deadline_s
        self._error: SlackwaterError | None = None
        self._thread = threading.Thread(target=self._run, name="weight pull", daemon=True)
        agent.shelf.expect(payload, True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until it has all come; its error is raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    @contextmanager
    def bucket(self, number: int) -> Iterator[tuple[memoryview, ...]]:
        """A complete bucket's memory inside the context."""
        shelf = self._agent.shelf
        while True:
            try:
                slot = shelf.open(BucketKey(self._payload, number), _LOOK_S)
                break
            except NotFoundError:
                self._raise_if_ended()
        try:
            while not slot.complete:
                try:
                    shelf.wait(slot, slot.size - 1, _LOOK_S)
                except UnavailableError:
                    self._raise_if_ended()
            yield slot.views
        finally:
            shelf.close(slot)

    def _raise_if_ended(self) -> None:
        if not self._thread.is_alive():
            self.finish()
            raise UnavailableError(f"version {self._payload.version!r} was dropped while it came")

    def _run(self) -> None:
        try:
            how = (self._deadline_s, self._memory, self._seen)
            self._agent.bring(self._payload, self._manifest, *how)
        except SlackwaterError as error:
            self._error = error
