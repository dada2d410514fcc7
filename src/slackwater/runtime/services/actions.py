"""Actions and environments for tenants: durable once answered, one outcome for each action.

An action is logged before the broker gets it, and its outcome before its owner does. A restart
adopts the log: waiting actions wait again, and running ones are lost unless they may be retried.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from slackwater.control.actions import events
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.snapshots import Snapshot
from slackwater.model.action import GpuService, Limit, OutcomeKind
from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.ids import (
    ActionId,
    EnvironmentId,
    JobId,
    TenantId,
    qualify_id,
)
from slackwater.model.tenant_limits import TenantLimits
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.net.background import Background, wait_until_set
from slackwater.runtime.services.action_table import (
    SERVICE_FACT,
    ActionEntry,
    ActionTable,
    EnvironmentEntry,
    short_command,
)
from slackwater.runtime.store import action_log as log
from slackwater.runtime.store.action_log import all_snapshots, drop_snapshot, put_snapshot
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.facts import facts_under, put_fact
from slackwater.wire.rewards import failure
from slackwater.wire.sandbox import Stream

_FORGET_EVERY_S = 60.0
_LIMIT_FACT = "limit/"  # prefix of the facts that name limits


class ActionService:
    """All actions and environments of one service."""

    def __init__(
        self,
        store: Store,
        background: Background,
        executor: ActionExecutor,
        broker: ActionBroker,
        table: ActionTable,
        *,
        results_kept_s: float,
        is_shared: bool,
    ) -> None:
        """`is_shared`: several tenants use the service, so a refusal of one is delayed."""
        self._store = store
        self._background = background
        self._executor = executor
        self._broker = broker
        self._table = table
        self._results_kept_s = results_kept_s
        self._is_shared = is_shared
        self._arriving = Counter[TenantId]()  # actions that are being written to the log
        self._stopping = asyncio.Event()

    async def adopt(self) -> None:
        """Take over environments and actions from the durable log."""
        for limit in await self._store.call(partial(facts_under, prefix=_LIMIT_FACT, kind=Limit)):
            self._executor.feed(events.LimitDeclared(loop_time(), limit))
        read = partial(facts_under, prefix=SERVICE_FACT, kind=GpuService)
        for service in await self._store.call(read):
            self._executor.declare(service)
        for snapshot in await self._store.call(all_snapshots):
            self._table.snapshots.add(snapshot)
        environments = await self._store.call(log.open_environments)
        waiting = await self._store.call(log.open_actions)
        for tenant, stored in environments:
            self._table.environments[stored.spec.environment] = EnvironmentEntry(tenant, stored)
            self._executor.feed(events.EnvironmentAdopted(loop_time(), stored.spec))
        for tenant, stored_request, created_s, started in waiting:
            request = log.clamp_limits(stored_request, self.limits_of(tenant))
            since_s = loop_time() - max(time.time() - created_s, 0.0)
            self._table.actions[request.spec.action] = ActionEntry(tenant, request, since_s)
            self._executor.feed(events.ActionAdopted(loop_time(), request.spec, since_s, started))
        self._background.spawn(self._forget())

    def close(self) -> None:
        """Wake every waiter; live actions continue after the next start."""
        self._stopping.set()
        self._table.wake_all()

    async def _forget(self) -> None:
        while not self._stopping.is_set():
            before_s = time.time() - self._results_kept_s
            await self._store.call(partial(log.drop_ended, before_s=before_s))
            await wait_until_set(self._stopping, _FORGET_EVERY_S)

    # ---- limits of tenants ----
    def limits_of(self, tenant: TenantId) -> TenantLimits:
        return self._broker.state.settings.tenants.limits_of(tenant)

    def pause_s(self, tenant: TenantId) -> float:
        """Seconds that a tenant of a shared service should wait before it submits more."""
        return self._broker.state.tenant(tenant).pause_s() if self._is_shared else 0.0

    @contextlib.asynccontextmanager
    async def _delay_refusal(self, tenant: TenantId) -> AsyncIterator[None]:
        """Answer a refused tenant late: clients retry at once, and would crowd others out."""
        try:
            yield
        except UnavailableError:
            if self._is_shared:
                pause_s = self._broker.state.tenant(tenant).long_pause_s()
                await wait_until_set(self._stopping, pause_s)
            raise

    def memory_of(self, tenant: TenantId, environment: str | None) -> int | None:
        """The MiB that a tenant's environment reserves for its own actions; None if it has no such
        environment, which `submit` refuses.
        """
        if environment is None:
            return None
        found = self._table.environments.get(EnvironmentId(environment))
        if found is None or found.tenant != tenant:
            return None
        return found.request.spec.memory_mib

    # ---- actions ----
    async def submit(self, tenant: TenantId, request: log.ActionRequest) -> ActionId:
        """Accept an action; submitting it again returns the same id. UnavailableError: full."""
        name = request.spec.action
        if name not in self._table.actions:
            async with self._delay_refusal(tenant):
                self._check_room(tenant)
        environment = request.spec.environment
        if environment is not None:
            self._find_environment(tenant, environment)
        service = request.spec.service
        if service is not None and (reason := self._executor.failure_of(service)) is not None:
            raise RefusedError(failure(service, reason))
        if service is not None and service not in self._executor.services:
            raise UnavailableError(f"service {service} is not staged yet; try again")
        started = bool(request.command) and not self._arriving[tenant]
        started = started and self._broker.could_start(request.spec)
        self._arriving[tenant] += 1
        try:
            now_s = time.time()
            added = await self._store.call_small(
                lambda c: log.add_action(c, tenant, request, now_s, started)
            )
        finally:
            self._arriving[tenant] -= 1
        if added:
            await self._begin(tenant, request, started=started)
        return name

    async def _begin(self, tenant: TenantId, request: log.ActionRequest, *, started: bool) -> None:
        """Feed the action to the broker. One that will likely start is logged as `started`, which
        saves a second write; the log is corrected if it did not start.
        """
        name = request.spec.action
        live = self._table.actions[name] = ActionEntry(tenant, request, loop_time())
        if started:
            self._executor.mark_started(name)
        self._executor.feed(events.ActionSubmitted(loop_time(), request.spec))
        if started and live.attempt is None:
            self._executor.mark_started(name, False)
            await self._store.call_small(partial(log.mark_waiting, name=name))

    def _check_room(self, tenant: TenantId) -> None:
        """Refuse what the queue has no room for; actions being logged count as queued."""
        self._broker.check_room(tenant)
        state, arriving = self._broker.state, self._arriving.total()
        if state.waiting + arriving >= state.settings.max_waiting:
            raise UnavailableError(
                f"the queue is full: {state.waiting} actions are waiting and {arriving} "
                "are coming; try again later"
            )

    async def result(
        self, tenant: TenantId, name: ActionId, hold_s: float
    ) -> log.ActionResult | None:
        """The result of an action; None if it has not ended within `hold_s`."""
        live = self._table.actions.get(name)
        if live is not None:
            if live.tenant != tenant:
                raise _unknown_action(name)
            if not self._stopping.is_set():
                await wait_until_set(live.ended, hold_s)
            if name in self._table.actions:
                return None
        return await self._find_result(tenant, name)

    async def _find_result(self, tenant: TenantId, name: ActionId) -> log.ActionResult:
        owner, result = self._table.recent.find(name)
        if result is None:
            row = await self._store.call(lambda c: log.find_action(c, name))
            if row is None or row.result is None:
                raise _unknown_action(name)
            owner, result = row.tenant, log.decode_result(row.result)
        if owner != tenant:
            raise _unknown_action(name)
        return result

    def state(self, name: ActionId) -> str:
        """Of an action that has no result yet."""
        live = self._table.actions.get(name)
        return "running" if live is not None and live.attempt is not None else "waiting"

    def cancel(self, tenant: TenantId, name: ActionId) -> None:
        """Cancel an action; one that has ended keeps its result."""
        live = self._table.actions.get(name)
        if live is not None:
            if live.tenant != tenant:
                raise _unknown_action(name)
            self._executor.feed(events.ActionCancelled(loop_time(), name))

    async def wait_until_started(self, tenant: TenantId, name: ActionId, hold_s: float) -> bool:
        """Wait up to `hold_s`; whether the action has started, so that its permit is held."""
        live = self._find_open(tenant, name)
        await wait_until_set(live.started, hold_s)
        return live.attempt is not None

    def finish_permit(self, tenant: TenantId, name: ActionId, ran_s: float) -> None:
        """Give a permit back: its owner has used it for `ran_s`."""
        live = self._find_open(tenant, name)
        if not live.request.is_permit or live.attempt is None:
            raise RefusedError(f"action: {name!r} is not a permit that is held now")
        self._executor.finish_attempt(name, live.attempt, OutcomeKind.DONE, ran_s)

    async def output(self, tenant: TenantId, name: ActionId) -> AsyncIterator[tuple[Stream, bytes]]:
        """Stream the output of an action from its beginning until the action ends."""
        live = self._table.actions.get(name)
        if live is None:
            result = await self._find_result(tenant, name)
            if result.stdout:
                yield "stdout", result.stdout
            if result.stderr:
                yield "stderr", result.stderr
            return
        live = self._find_open(tenant, name)
        sent = 0
        while True:
            for piece in live.output[sent:]:
                yield piece
            sent = len(live.output)
            if live.ended.is_set():
                return
            live.changed.clear()
            await live.changed.wait()

    def _find_open(self, tenant: TenantId, name: ActionId) -> ActionEntry:
        live = self._table.actions.get(name)
        if live is None or live.tenant != tenant:
            raise _unknown_action(name)
        return live

    # ---- environments ----
    async def open(self, tenant: TenantId, request: log.EnvironmentRequest) -> EnvironmentId:
        """Request an environment; actions in it may be submitted at once."""
        name = request.spec.environment
        if name not in self._table.environments:
            async with self._delay_refusal(tenant):
                self._broker.check_environment(request.spec)
        if request.snapshot is not None:
            self._table.snapshots.find_stored_name(tenant, request.snapshot)
        added = await self._store.call_small(
            lambda c: log.add_environment(c, tenant, request, time.time())
        )
        if added:
            self._table.environments[name] = EnvironmentEntry(tenant, request)
            self._executor.feed(events.EnvironmentRequested(loop_time(), request.spec))
        return name

    async def wait_until_open(self, tenant: TenantId, name: EnvironmentId, hold_s: float) -> bool:
        """Wait up to `hold_s`; whether it is open. NotFoundError: it ended, and why."""
        entry = self._find_environment(tenant, name)
        await wait_until_set(entry.ready, hold_s)
        if entry.ended is not None:
            raise NotFoundError(f"environment: {name!r} has ended: {entry.ended}")
        return entry.ready.is_set() and not self._stopping.is_set()

    async def close_environment(self, tenant: TenantId, name: EnvironmentId) -> None:
        """This cancels its actions."""
        self._find_environment(tenant, name)
        self._executor.feed(events.EnvironmentClosed(loop_time(), name))
        self._table.end_environment(name, "it was closed")

    async def snapshot(self, tenant: TenantId, name: EnvironmentId, label: str) -> None:
        """Save its content under a name from which environments on its node can start."""
        qualify_id(tenant, label, "snapshot")  # refuses what an older version could have named
        entry = self._find_environment(tenant, name)
        live = self._broker.state.environments.get(name)
        if live is None or live.node is None or not entry.ready.is_set():
            raise RefusedError(f"environment: {name!r} is not open yet; wait for it")
        if live.queue:
            raise RefusedError(f"environment: {name!r} is in use; take snapshots between actions")
        snapshot = Snapshot(tenant, label, live.node)
        most_bytes = self._table.snapshots.room_bytes(snapshot, self.limits_of(tenant))
        is_new = self._table.snapshots.add(snapshot)
        await self._store.call(partial(put_snapshot, snapshot=snapshot, now_s=time.time()))
        outcome = await self._executor.keep_snapshot(
            live.node, name, snapshot.stored_name, most_bytes
        )
        if outcome.error is None:
            snapshot = self._table.snapshots.set_size(snapshot, outcome.size_bytes)
            await self._store.call(partial(put_snapshot, snapshot=snapshot, now_s=time.time()))
            return
        if is_new:
            self._table.snapshots.remove(snapshot)
            await self._store.call(partial(drop_snapshot, snapshot=snapshot))
        raise RefusedError(outcome.error.replace(snapshot.stored_name, label))

    def environments(self, tenant: TenantId) -> list[EnvironmentId]:
        entries = self._table.environments.items()
        return sorted(name for name, entry in entries if entry.tenant == tenant)

    def _find_environment(self, tenant: TenantId, name: EnvironmentId) -> EnvironmentEntry:
        entry = self._table.environments.get(name)
        if entry is None or entry.tenant != tenant:
            raise NotFoundError(f"environment: {name!r} is not one of yours, or has ended")
        return entry

    # ---- limits of resources ----
    async def declare(self, limit: Limit) -> None:
        """Declare how much there is of a resource that no worker provides; durable."""
        await self._store.call(partial(put_fact, name=_LIMIT_FACT + limit.resource, value=limit))
        self._executor.feed(events.LimitDeclared(loop_time(), limit))

    # ---- for operators ----
    def gauges(self) -> dict[str, float]:
        state = self._broker.state
        return {
            "sandboxes": len(self._executor.facts),
            "actions_waiting": state.waiting,
            "actions_running": len(state.attempts),
            "environments": len(state.environments),
        }

    def cores_in_use(self) -> tuple[int, int]:
        """The number of open environments, and of the cores that running actions use."""
        state = self._broker.state
        cores = sum(len(attempt.grant.cores) for attempt in state.attempts.values())
        return len(state.environments), cores

    def running_jobs(self) -> set[JobId]:
        return {attempt.action.spec.job for attempt in self._broker.state.attempts.values()}

    def top(self, most: int = 50) -> dict[str, Any]:
        """Workers, running and waiting actions, and the results of late."""
        now = loop_time()
        live = sorted(self._table.actions.items(), key=lambda item: item[1].since_s)
        return {
            "gauges": self.gauges(),
            "nodes": [
                {"worker": worker, "node": facts.node, "backend": facts.backend, "said": facts.said,
                 "cores": sum(len(numa) for numa in facts.cores), "memory_mib": facts.memory_mib}
                for worker, facts in sorted(self._executor.facts.items())
            ],
            "rewards": [
                {"worker": worker, "node": facts.node, "devices": facts.devices,
                 "services": [service.service for service in facts.services],
                 "failed": facts.failed}
                for worker, facts in sorted(self._executor.reward_facts.items())
            ],
            "live": [self._action_row(name, item, now) for name, item in live[:most]],
            "ended": list(self._table.recent_rows)[-most:],
        }  # fmt: skip

    def _action_row(self, name: ActionId, live: ActionEntry, now: float) -> dict[str, Any]:
        known = self._broker.state.actions.get(name)
        attempt = known.attempt if known is not None else None
        return {
            "action": name,
            "job": live.request.spec.job,
            "command": short_command(live.request.command),
            "state": "waiting" if attempt is None else "running",
            "cores": 0 if attempt is None else len(attempt.grant.cores),
            "age_s": round(now - live.since_s, 3),
        }


def _unknown_action(name: ActionId) -> NotFoundError:
    return NotFoundError(f"action: {name!r} is not one of yours, or has expired")


def job_of(tenant: TenantId, name: str | None) -> JobId:
    """Jobs are a tenant's own."""
    return JobId(f"{tenant}/{name or 'default'}")
