"""Actions and environments for tenants: durable once answered, one outcome for each action.

An action is logged before the broker hears of it, its outcome before its owner does. A restart
adopts the log: what waited waits again, what was running is lost unless it may be retried.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.snapshots import Snapshot, SnapshotRegistry
from slackwater.model.action import GpuService, Limit, OutcomeKind
from slackwater.model.errors import NotFoundError, RefusedError, UnavailableError
from slackwater.model.ids import (
    ActionId,
    EnvironmentId,
    JobId,
    NodeId,
    TenantId,
    owned_id,
    snapshot_id,
)
from slackwater.model.tenant_limits import TenantLimits
from slackwater.runtime.executors.actions import ActionExecutor
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.net.background import Background
from slackwater.runtime.services.recent_results import RecentResults
from slackwater.runtime.store import action_log as log
from slackwater.runtime.store.action_log import all_snapshots, drop_snapshot, put_snapshot
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.job_accounts import facts_under, put_fact
from slackwater.runtime.store.write_ahead import WriteAhead
from slackwater.wire.rewards import failure
from slackwater.wire.sandbox import Stream

_FORGET_EVERY_S = 60.0
_LIMIT, _SERVICE = "limit/", "service/"  # facts of these names


@dataclass(slots=True)
class _OpenAction:
    """An action without an outcome: who waits for it, and who listens to what it prints."""

    tenant: TenantId
    request: log.ActionRequest
    since_s: float
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    attempt: int | None = None
    output: list[tuple[Stream, bytes]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _OpenEnvironment:
    """An environment that has not ended."""

    tenant: TenantId
    request: log.EnvironmentRequest
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    node: NodeId | None = None
    ended: str | None = None


class ActionService:
    """All actions and environments of one service."""

    def __init__(
        self,
        store: Store,
        ahead: WriteAhead,
        background: Background,
        body: ActionExecutor,
        broker: ActionBroker,
        kept_s: float,
        tenants: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._ahead = ahead
        self._background = background
        self._executor = body
        self._broker = broker
        self._results_kept_s = kept_s
        self._live: dict[ActionId, _OpenAction] = {}
        self._environments: dict[EnvironmentId, _OpenEnvironment] = {}
        self._recent = RecentResults()
        self._recent_rows: deque[dict[str, Any]] = deque(maxlen=200)  # without what they printed
        self._is_shared = len(tenants) > 1
        self._snapshots = SnapshotRegistry(tenants)
        self._arriving = Counter[TenantId]()  # that are being written to the log
        self._closed = False
        self._stopping = asyncio.Event()
        body.belongs_to(self)

    async def adopt(self) -> None:
        """Take over environments and actions from the durable log."""
        for limit in await self._store.call(partial(facts_under, prefix=_LIMIT, kind=Limit)):
            self._executor.feed(on.LimitDeclared(loop_time(), limit))
        read = partial(facts_under, prefix=_SERVICE, kind=GpuService)
        for service in await self._store.call(read):
            self._executor.declare(service)
        for snapshot in await self._store.call(all_snapshots):
            self._snapshots.add(snapshot)
        places = await self._store.call(log.open_environments)
        waiting = await self._store.call(log.open_actions)
        for tenant, place in places:
            self._environments[place.spec.environment] = _OpenEnvironment(tenant, place)
            self._executor.feed(on.EnvironmentAdopted(loop_time(), place.spec))
        for tenant, asked, created_s, started in waiting:
            request = log.clamp_limits(asked, self.limits_of(tenant))
            since_s = loop_time() - max(time.time() - created_s, 0.0)
            self._live[request.spec.action] = _OpenAction(tenant, request, since_s)
            self._executor.feed(on.ActionAdopted(loop_time(), request.spec, since_s, started))
        self._background.spawn(self._forget())

    def close(self) -> None:
        """Let everybody go who waits; what is under way goes on after the next start."""
        self._closed = True
        self._stopping.set()
        for live in self._live.values():
            for event in (live.ended, live.started, live.changed):
                event.set()
        for place in self._environments.values():
            place.ready.set()

    async def _forget(self) -> None:
        while not self._stopping.is_set():
            before_s = time.time() - self._results_kept_s
            await self._store.call(partial(log.drop_ended, before_s=before_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FORGET_EVERY_S):
                    await self._stopping.wait()

    # ---- what the operator lets a tenant do ----
    def limits_of(self, tenant: TenantId) -> TenantLimits:
        return self._broker.state.settings.tenants.of(tenant)

    def pause_s(self, tenant: TenantId) -> float:
        """How long the tenant should wait before it asks for more, where others may ask too."""
        return self._broker.state.tenant(tenant).pause_s() if self._is_shared else 0.0

    @contextlib.asynccontextmanager
    async def _delay_refusal(self, tenant: TenantId) -> AsyncIterator[None]:
        """Whoever hears at once that there is no room asks again at once."""
        try:
            yield
        except UnavailableError:
            if self._is_shared:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._broker.state.tenant(tenant).long_pause_s()):
                        await self._stopping.wait()
            raise

    def memory_of(self, tenant: TenantId, environment: str | None) -> int | None:
        """The MiB that an environment of the tenant's holds, which its actions have to
        themselves; `submit` refuses an environment that is not one."""
        place = None if environment is None else self._environments.get(EnvironmentId(environment))
        if place is None or place.tenant != tenant:
            return None
        return place.request.spec.memory_mib

    # ---- actions ----
    async def submit(self, tenant: TenantId, request: log.ActionRequest) -> ActionId:
        """Take an action; the same one again is the same. A full queue: UnavailableError."""
        name = request.spec.action
        if name not in self._live:
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
            now, add = time.time(), log.add_action
            add = partial(add, tenant=tenant, request=request, now_s=now, started=started)
            known = await self._store.call_small(add)
        finally:
            self._arriving[tenant] -= 1
        if known is None:
            await self._begin(tenant, request, started=started)
        return name

    async def _begin(self, tenant: TenantId, request: log.ActionRequest, *, started: bool) -> None:
        """Logged as started, if likely, to save a second write; corrected if it does not."""
        name = request.spec.action
        live = self._live[name] = _OpenAction(tenant, request, loop_time())
        if started:
            self._executor.mark_started(name)
        self._executor.feed(on.ActionSubmitted(loop_time(), request.spec))
        if started and live.attempt is None:
            self._executor.mark_started(name, False)
            await self._store.call_small(partial(log.mark_waiting, name=name))

    def _check_room(self, tenant: TenantId) -> None:
        """Those that are being written to the log will stand in the queue too."""
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
        """How an action ended, or None if it has not within `hold_s`."""
        live = self._live.get(name)
        if live is not None:
            if live.tenant != tenant:
                raise _unknown_action(name)
            if not self._closed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(hold_s):
                        await live.ended.wait()
            if name in self._live:
                return None
        return await self._find_result(tenant, name)

    async def _find_result(self, tenant: TenantId, name: ActionId) -> log.ActionResult:
        owner, result = self._recent.find(name)
        if result is None:
            row = await self._store.call(lambda c: log.find_action(c, name))
            if row is None or row.result is None:
                raise _unknown_action(name)
            owner, result = row.tenant, log.decode_result(row.result)
        if owner != tenant:
            raise _unknown_action(name)
        return result

    def state(self, name: ActionId) -> str:
        """Of one without an outcome."""
        live = self._live.get(name)
        return "running" if live is not None and live.attempt is not None else "waiting"

    def cancel(self, tenant: TenantId, name: ActionId) -> None:
        """One that is over stays as it is."""
        live = self._live.get(name)
        if live is not None:
            if live.tenant != tenant:
                raise _unknown_action(name)
            self._executor.feed(on.ActionCancelled(loop_time(), name))

    async def wait_until_started(self, tenant: TenantId, name: ActionId, hold_s: float) -> bool:
        """Whether a permit is held now."""
        live = self._find_open(tenant, name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await live.started.wait()
        return live.attempt is not None

    def finish_permit(self, tenant: TenantId, name: ActionId, ran_s: float) -> None:
        """The owner of a permit says that its use is over."""
        live = self._find_open(tenant, name)
        if not live.request.is_permit or live.attempt is None:
            raise RefusedError(f"action: {name!r} is no permit that is held")
        self._executor.finish_attempt(name, live.attempt, OutcomeKind.DONE, ran_s)

    async def output(self, tenant: TenantId, name: ActionId) -> AsyncIterator[tuple[Stream, bytes]]:
        """What it prints, from its beginning, as it comes; ends when it does."""
        live = self._live.get(name)
        if live is None:
            result = await self._find_result(tenant, name)
            if result.stdout:
                yield "stdout", result.stdout
            if result.stderr:
                yield "stderr", result.stderr
            return
        live = self._find_open(tenant, name)
        place = 0
        while True:
            for piece in live.output[place:]:
                yield piece
            place = len(live.output)
            if live.ended.is_set():
                return
            live.changed.clear()
            await live.changed.wait()

    def _find_open(self, tenant: TenantId, name: ActionId) -> _OpenAction:
        live = self._live.get(name)
        if live is None or live.tenant != tenant:
            raise _unknown_action(name)
        return live

    # ---- environments ----
    async def open(self, tenant: TenantId, request: log.EnvironmentRequest) -> EnvironmentId:
        """Ask for an environment; actions in it may be submitted at once."""
        name = request.spec.environment
        if name not in self._environments:
            async with self._delay_refusal(tenant):
                self._broker.check_environment(request.spec)
        if request.snapshot is not None:
            self._snapshots.find_stored_name(tenant, request.snapshot)
        added = await self._store.call_small(
            lambda c: log.add_environment(c, tenant, request, time.time())
        )
        if added:
            self._environments[name] = _OpenEnvironment(tenant, request)
            self._executor.feed(on.EnvironmentAsked(loop_time(), request.spec))
        return name

    async def wait_until_open(self, tenant: TenantId, name: EnvironmentId, hold_s: float) -> bool:
        """Whether it is open; NotFoundError says why it never will be."""
        place = self._find_environment(tenant, name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(hold_s):
                await place.ready.wait()
        if place.ended is not None:
            raise NotFoundError(f"environment: {name!r} has ended: {place.ended}")
        return place.ready.is_set() and not self._closed

    async def close_environment(self, tenant: TenantId, name: EnvironmentId) -> None:
        """Its owner is done with it: its actions are cancelled."""
        self._find_environment(tenant, name)
        self._executor.feed(on.EnvironmentClosed(loop_time(), name))
        self.environment_ended(name, "it was closed")

    async def snapshot(self, tenant: TenantId, name: EnvironmentId, given: str) -> None:
        """Keep its content under a name that other environments on its node can start from."""
        owned_id(tenant, given, "snapshot")  # refuses what an older version could have named
        place = self._find_environment(tenant, name)
        live = self._broker.state.environments.get(name)
        if live is None or live.node is None or not place.ready.is_set():
            raise RefusedError(f"environment: {name!r} is not open yet; wait for it")
        if live.queue:
            raise RefusedError(f"environment: {name!r} is in use; take snapshots between actions")
        snapshot = Snapshot(tenant, given, live.node)
        most_bytes = self._snapshots.room_bytes(snapshot, self.limits_of(tenant))
        is_new = self._snapshots.add(snapshot)
        await self._store.call(partial(put_snapshot, snapshot=snapshot, now_s=time.time()))
        kept = await self._executor.keep_snapshot(live.node, name, snapshot.stored_name, most_bytes)
        if kept.error is None:
            snapshot = self._snapshots.set_size(snapshot, kept.size_bytes)
            await self._store.call(partial(put_snapshot, snapshot=snapshot, now_s=time.time()))
            return
        if is_new:
            self._snapshots.remove(snapshot)
            await self._store.call(partial(drop_snapshot, snapshot=snapshot))
        raise RefusedError(kept.error.replace(snapshot.stored_name, given))

    def environments(self, tenant: TenantId) -> list[EnvironmentId]:
        return sorted(name for name, place in self._environments.items() if place.tenant == tenant)

    def _find_environment(self, tenant: TenantId, name: EnvironmentId) -> _OpenEnvironment:
        place = self._environments.get(name)
        if place is None or place.tenant != tenant:
            raise NotFoundError(f"environment: {name!r} is not one of yours, or has ended")
        return place

    # ---- limits ----
    async def declare(self, limit: Limit) -> None:
        """There is so much of a resource that no worker brings; remembered over a restart."""
        await self._store.call(partial(put_fact, name=_LIMIT + limit.resource, value=limit))
        self._executor.feed(on.LimitDeclared(loop_time(), limit))

    def save_service(self, service: GpuService) -> None:
        """Remembered over a restart, so that what waits for it then goes on waiting."""
        write = partial(put_fact, name=_SERVICE + service.service, value=service)
        self._background.spawn(self._store.call(write))

    # ---- for the body ----
    def action_request(self, action: ActionId) -> log.ActionRequest:
        return self._live[action].request

    def environment_request(self, environment: EnvironmentId) -> log.EnvironmentRequest:
        return self._environments[environment].request

    def snapshot_of(self, environment: EnvironmentId) -> str | None:
        """What the snapshot that it begins from is called on its node."""
        place = self._environments[environment]
        name = place.request.snapshot
        if name is None:
            return None
        try:
            return self._snapshots.find_stored_name(place.tenant, name)
        except NotFoundError:  # asked for under an older version; its worker will not find this one
            return snapshot_id(place.tenant, name)

    def record_grant(self, action: ActionId, attempt: int) -> None:
        live = self._live[action]
        live.attempt = attempt
        live.output.clear()
        live.started.set()

    def append_output(self, action: ActionId, stream: Stream, data: bytes) -> None:
        live = self._live.get(action)
        if live is not None and live.request.stream:
            live.output.append((stream, data))
            live.changed.set()

    def record_result(self, action: ActionId, result: log.ActionResult) -> None:
        """Its one outcome: written first, told then."""
        write = partial(log.end_actions, results=[(action, result)], now_s=time.time())
        self._ahead.then(partial(self._settle, action, result), write)

    def _settle(self, action: ActionId, result: log.ActionResult) -> None:
        live = self._live.pop(action)
        self._recent.add(action, live.tenant, result)
        self._recent_rows.append(_result_row(action, live.request, result))
        for event in (live.ended, live.started, live.changed):
            event.set()

    def environment_ready(self, environment: EnvironmentId) -> None:
        place = self._environments.get(environment)
        if place is not None:
            place.ready.set()

    def environment_ended(self, environment: EnvironmentId, reason: str) -> None:
        place = self._environments.pop(environment, None)
        if place is None:
            return
        if place.request.snapshot is not None:
            kept_as = snapshot_id(place.tenant, place.request.snapshot)
            reason = reason.replace(kept_as, place.request.snapshot)
        place.ended = reason
        place.ready.set()
        end = partial(log.end_environment, name=environment, why=reason, now_s=time.time())
        self._background.spawn(self._store.call_small(end))

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
        """Open environments, and the cores that running actions hold."""
        state = self._broker.state
        held = sum(len(attempt.grant.cores) for attempt in state.attempts.values())
        return len(state.environments), held

    def running_jobs(self) -> set[JobId]:
        """Jobs that an action runs for."""
        return {attempt.action.spec.job for attempt in self._broker.state.attempts.values()}

    def top(self, most: int = 50) -> dict[str, Any]:
        """What runs, what waits, what ended last."""
        now = loop_time()
        live = sorted(self._live.items(), key=lambda item: item[1].since_s)
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
            "ended": list(self._recent_rows)[-most:],
        }  # fmt: skip

    def _action_row(self, name: ActionId, live: _OpenAction, now: float) -> dict[str, Any]:
        known = self._broker.state.actions.get(name)
        attempt = known.attempt if known is not None else None
        return {
            "action": name,
            "job": live.request.spec.job,
            "command": _short(live.request.command),
            "state": "waiting" if attempt is None else "running",
            "cores": 0 if attempt is None else len(attempt.grant.cores),
            "age_s": round(now - live.since_s, 3),
        }


def _result_row(
    action: ActionId, request: log.ActionRequest, result: log.ActionResult
) -> dict[str, Any]:
    return {
        "action": action,
        "job": request.spec.job,
        "command": _short(request.command),
        "kind": result.kind,
        "queued_s": round(result.queued_s, 3),
        "ran_s": round(result.ran_s, 3),
        "cores": len(result.cores),
    }


def _short(command: Sequence[str]) -> str:
    return " ".join(command)[:80] or "(no command)"


def _unknown_action(name: ActionId) -> NotFoundError:
    return NotFoundError(f"action: {name!r} is not one of yours, or has expired")


def job_of(tenant: TenantId, name: str | None) -> JobId:
    """Jobs are a tenant's own."""
    return JobId(f"{tenant}/{name or 'default'}")
