"""Actions and environments that have not ended: the executor records what happens to them, and the
action service waits for it.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slackwater.control.actions.snapshots import SnapshotRegistry
from slackwater.model.action import GpuService
from slackwater.model.errors import NotFoundError
from slackwater.model.ids import ActionId, EnvironmentId, TenantId, snapshot_id
from slackwater.runtime.net.background import Background
from slackwater.runtime.store import action_log as log
from slackwater.runtime.store.action_log import ActionResult
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.facts import put_fact
from slackwater.runtime.store.outcomes import WriteAhead
from slackwater.wire.sandbox import Stream

_MOST_BYTES = 32 << 20
_MOST_RESULTS = 2000


class RecentResults:
    """Results of recent actions; the store has all of them. Bounded by number and by bytes: the
    output of one action may be megabytes.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES, most_results: int = _MOST_RESULTS) -> None:
        self._most_bytes, self._most_results = most_bytes, most_results
        self._results: OrderedDict[ActionId, tuple[TenantId, ActionResult]] = OrderedDict()
        self.held_bytes = 0

    def add(self, action: ActionId, tenant: TenantId, result: ActionResult) -> None:
        """Add the newest result and drop the oldest beyond the limits."""
        self._drop(action)
        self._results[action] = (tenant, result)
        self.held_bytes += _size_bytes(result)
        while self._results and (
            self.held_bytes > self._most_bytes or len(self._results) > self._most_results
        ):
            self._drop(next(iter(self._results)))

    def find(self, action: ActionId) -> tuple[TenantId | None, ActionResult | None]:
        return self._results.get(action, (None, None))

    def _drop(self, action: ActionId) -> None:
        dropped = self._results.pop(action, None)
        if dropped is not None:
            self.held_bytes -= _size_bytes(dropped[1])


def _size_bytes(result: ActionResult) -> int:
    return len(result.stdout) + len(result.stderr)


SERVICE_FACT = "service/"  # prefix of the facts that name reward services


@dataclass(slots=True)
class ActionEntry:
    """An action without an outcome, and the events that its owner can wait for."""

    tenant: TenantId
    request: log.ActionRequest
    since_s: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    attempt: int | None = None
    output: list[tuple[Stream, bytes]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        for event in (self.ended, self.started, self.changed):
            event.set()


@dataclass(slots=True)
class EnvironmentEntry:
    """An environment that has not ended; `ended` is the reason once it has."""

    tenant: TenantId
    request: log.EnvironmentRequest
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: str | None = None


class ActionTable:
    """Every action and environment of one service that has not ended, and recent results."""

    def __init__(
        self, store: Store, ahead: WriteAhead, background: Background, tenants: Sequence[str] = ()
    ) -> None:
        self._store, self._ahead, self._background = store, ahead, background
        self.actions: dict[ActionId, ActionEntry] = {}
        self.environments: dict[EnvironmentId, EnvironmentEntry] = {}
        self.snapshots = SnapshotRegistry(tenants)
        self.recent = RecentResults()
        self.recent_rows: deque[dict[str, Any]] = deque(maxlen=200)  # without their output

    def wake_all(self) -> None:
        """Wake every waiter: the service stops."""
        for action in self.actions.values():
            action.wake()
        for environment in self.environments.values():
            environment.ready.set()

    # ---- what the executor asks ----
    def snapshot_of(self, environment: EnvironmentId) -> str | None:
        """The file name, on its node, of the snapshot that an environment starts from."""
        opened = self.environments[environment]
        name = opened.request.snapshot
        if name is None:
            return None
        try:
            return self.snapshots.find_stored_name(opened.tenant, name)
        except NotFoundError:  # asked for under an older version; its worker will not find this one
            return snapshot_id(opened.tenant, name)

    # ---- what the executor records ----
    def record_grant(self, action: ActionId, attempt: int) -> None:
        granted = self.actions[action]
        granted.attempt = attempt
        granted.output.clear()
        granted.started.set()

    def append_output(self, action: ActionId, stream: Stream, data: bytes) -> None:
        found = self.actions.get(action)
        if found is not None and found.request.stream:
            found.output.append((stream, data))
            found.changed.set()

    def record_result(self, action: ActionId, result: log.ActionResult) -> None:
        """Write the one outcome of an action to the log, and then tell its owner."""
        write = partial(log.end_actions, results=[(action, result)], now_s=time.time())
        self._ahead.then(partial(self._settle, action, result), write)

    def _settle(self, action: ActionId, result: log.ActionResult) -> None:
        ended = self.actions.pop(action)
        self.recent.add(action, ended.tenant, result)
        self.recent_rows.append(_result_row(action, ended.request, result))
        ended.wake()

    def record_ready(self, environment: EnvironmentId) -> None:
        opened = self.environments.get(environment)
        if opened is not None:
            opened.ready.set()

    def end_environment(self, environment: EnvironmentId, reason: str) -> None:
        ended = self.environments.pop(environment, None)
        if ended is None:
            return
        if ended.request.snapshot is not None:
            stored_name = snapshot_id(ended.tenant, ended.request.snapshot)
            reason = reason.replace(stored_name, ended.request.snapshot)
        ended.ended = reason
        ended.ready.set()
        end = partial(log.end_environment, name=environment, why=reason, now_s=time.time())
        self._background.spawn(self._store.call_small(end))

    def save_service(self, service: GpuService) -> None:
        """Remember a reward service, so that actions can wait for it across a restart."""
        write = partial(put_fact, name=SERVICE_FACT + service.service, value=service)
        self._background.spawn(self._store.call(write))


def _result_row(
    action: ActionId, request: log.ActionRequest, result: log.ActionResult
) -> dict[str, Any]:
    return {
        "action": action,
        "job": request.spec.job,
        "command": short_command(request.command),
        "kind": result.kind,
        "queued_s": round(result.queued_s, 3),
        "ran_s": round(result.ran_s, 3),
        "cores": len(result.cores),
    }


def short_command(command: Sequence[str]) -> str:
    return " ".join(command)[:80] or "(no command)"
