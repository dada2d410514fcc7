"""Samples what every worker does, for the timeline of a running service and the time of its jobs.

Spans of permits are exact. Engines and trainers are sampled a few times a second, so an operation
that is shorter may be missed.
"""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from slackwater.control.operations.operations_state import RunHead
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.model.ids import JobId, WorkerId
from slackwater.model.instance import InstanceKind
from slackwater.model.job_life import JobStage
from slackwater.model.operation import OpKind
from slackwater.model.placement import Phase
from slackwater.model.slack import slack_row
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import PriceSettings
from slackwater.timeline.lanes import (
    FAULT,
    KINDS,
    ROLLOUT,
    SYNC,
    TAIL,
    TRAIN,
    LaneTimeline,
    TimelineLane,
)
from slackwater.timeline.perfetto import lanes_json
from slackwater.wire.lending import is_loan, lender_of

_EVERY_S = 0.25
_SHARE = 0.003  # of a core that sampling may take
_MAX_JOBS = 1000
_MAX_LANES = 4000
PARTS = ("rollout", "train", "sync", "tools", "queued", "other")
_FIRST = ("train", "rollout", "tools", "sync", "queued", "other")
_WAITS = (JobStage.SUBMITTED, JobStage.HELD)
_HOUR_S = 3600.0


class ActivitySampler:
    """Lanes: the co-scheduler's nodes, then engines and trainers by name."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.timeline = LaneTimeline()
        self.slack = SlackMeter(plane)
        self._taken = 0  # spans of permits
        self._alive: dict[str, int] = {}  # worker -> faults so far
        self._spent_s: dict[str, dict[str, float]] = {}
        self._last_s: float | None = None
        permits = None if plane.phases is None else plane.phases.executor.spans
        now_s = loop_time()
        whole = None if permits is None else permits.timeline("", "", now_s)
        self._start_s = now_s if whole is None else now_s - whole.end_s
        for rental in () if whole is None else whole.rentals:
            pool = f"{rental.node.rpartition('-')[0]} nodes"
            self.timeline.lane(rental.node, pool).rented_s.append((0.0, None))

    def now_s(self) -> float:
        """Seconds since the service started."""
        return loop_time() - self._start_s

    def trace(self) -> bytes:
        """The trace of the run so far, for Perfetto and `slackwater dashboard RUN`."""
        self.sample()
        return b"".join(lanes_json(self.timeline, self.now_s()))

    async def run(self) -> None:
        while True:
            began_s = time.perf_counter()
            self.sample()
            took_s = time.perf_counter() - began_s
            await asyncio.sleep(max(_EVERY_S, took_s / _SHARE))

    def sample(self) -> None:
        now_s = self.now_s()
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        self._take_permits()
        doing: dict[str, set[str]] = defaultdict(set)
        present: set[str] = set()
        for record in self._plane.controller.rollout.state.instances:
            present.add(record.spec.instance)
            self._sample_engine(record, now_s, doing)
            self.slack.record_worker(record.spec.kind, passed_s, busy=bool(record.attempts))
        self._plane.traces.record_spot(
            record.spec.instance
            for record in self._plane.controller.rollout.state.instances
            if record.spec.kind is InstanceKind.SPOT
        )
        self._sample_trainers(now_s, passed_s, present, doing)
        self._note_losses(present, now_s)
        self._account(doing, passed_s)
        self.slack.sample(passed_s)

    def _take_permits(self) -> None:
        phases = self._plane.controller.phases
        if self._plane.phases is None or phases is None:
            return
        spans = self._plane.phases.executor.spans.spans
        for span in spans[self._taken :]:
            lane = self.timeline.lane(span.node, "nodes")
            kind = TAIL if span.kind == "tail" else KINDS.index(span.phase.value)
            self.timeline.add(lane, span.job, kind, span.start_s, span.end_s)
        self._taken = len(spans)
        running = {
            node: (permit.job, permit.phase, permit.started_s - self._start_s)
            for permit in phases.scheduler.permits.active()
            for node in permit.nodes
            if not permit.shrunk
        }
        for name in [name for name in self.timeline.open if name not in self._alive]:
            del self.timeline.open[name]
        for node, (job, phase, since_s) in running.items():
            kind = ROLLOUT if phase is Phase.ROLLOUT else TRAIN
            self.timeline.open[node] = (self.timeline.job_number(job), kind, since_s)

    def _sample_engine(
        self, record: InstanceRecord, now_s: float, doing: dict[str, set[str]]
    ) -> None:
        name = record.spec.instance
        lane = self._join(name, f"{record.spec.kind.value} engines", record.faults, now_s)
        pulled = self._plane.controller.weights.pulling(name)
        turn = next(iter(record.attempts.values()), None)
        if turn is not None:
            self.timeline.begin(lane, turn.spec.job, ROLLOUT, now_s)
            doing[turn.spec.job].add("rollout")
        elif pulled:
            job = self._plane.controller.weights.job_of(next(iter(pulled)))
            self.timeline.begin(lane, job or f"weights of {record.spec.base_model}", SYNC, now_s)
            if job is not None:
                doing[job].add("sync")
        else:
            self.timeline.end(lane, now_s)

    def _sample_trainers(
        self, now_s: float, passed_s: float, present: set[str], doing: dict[str, set[str]]
    ) -> None:
        busy = self._plane.controller.operations.busy_trainers()
        for worker in self._plane.workers.names_by_role()["trainer"]:
            present.add(worker)
            lane, flight = self._join(worker, "trainers", 0, now_s), busy.get(WorkerId(worker))
            self.slack.record_worker("trainer", passed_s, busy=flight is not None)
            if flight is None:
                self.timeline.end(lane, now_s)
                continue
            job = str(flight.queue.job or flight.queue.model)
            publishes = isinstance(flight, RunHead) and flight.operation.kind is OpKind.PUBLISH
            self.timeline.begin(lane, job, SYNC if publishes else TRAIN, now_s)
            doing[job].add("sync" if publishes else "train")

    def _join(self, name: str, pool: str, faults: int, now_s: float) -> TimelineLane:
        lane = self.timeline.lane(name, pool)
        before = self._alive.get(name)
        if before is None:
            lane.rented_s.append((now_s, None))
        elif faults > before:
            self.timeline.add(lane, "fault", FAULT, now_s, now_s)
        self._alive[name] = faults
        return lane

    def _note_losses(self, present: set[str], now_s: float) -> None:
        for name in [name for name in self._alive if name not in present]:
            del self._alive[name]
            lane = self.timeline.lane(name, "")
            self.timeline.end(lane, now_s)
            if not self._is_expected_loss(name, present):
                self.timeline.add(lane, "lost", FAULT, now_s, now_s)
            lane.rented_s[-1] = (lane.rented_s[-1][0], now_s)
        self.timeline.forget_gone(_MAX_LANES)

    def _is_expected_loss(self, name: str, present: set[str]) -> bool:
        """Whether a worker that is gone was drained, rests until the trainers' devices are free, or
        was a loan of a serving worker that still runs.
        """
        resting = {spec.instance for spec in self._plane.controller.steps.resting()}
        returned = is_loan(name) and lender_of(name) in present
        return returned or name in resting or name in self._plane.instances.drained

    # ---- time of jobs ----
    def _account(self, doing: dict[str, set[str]], passed_s: float) -> None:
        """Add the time since the last sample to the first part of each live job that applies."""
        state = self._plane.controller.rollout.state
        counts = self._plane.controller.operations.waiting()
        waiting = {model for model, count in counts.items() if count}
        queued = {
            self._plane.sessions.job_of(model.session)
            for model in self._plane.training.models()
            if model.model in waiting
        }
        tools = self._plane.actions.running_jobs()
        for entry in self._plane.controller.jobs.entries():
            if entry.stage.over:
                continue
            parts = doing.get(entry.job, set())
            work = state.work.get(entry.job)
            if entry.job in tools:
                parts.add("tools")
            if entry.job in queued or (work is not None and work.live_turns):
                parts.add("queued")
            if entry.stage in _WAITS:
                parts.add("queued")
            part = next(name for name in _FIRST if name in parts or name == "other")
            spent = self._spent_s.setdefault(entry.job, dict.fromkeys(PARTS, 0.0))
            spent[part] += passed_s
        while len(self._spent_s) > _MAX_JOBS:
            del self._spent_s[next(iter(self._spent_s))]

    def breakdown(self, job: JobId) -> dict[str, float]:
        """Seconds of the job's life by part, since this process started."""
        return {part: round(s, 1) for part, s in self._spent_s.get(job, {}).items()}


@dataclass(slots=True)
class CapacityUse:
    """One kind of capacity: how long it was present, and how long it was busy."""

    present_s: float = 0.0
    busy_s: float = 0.0


class SlackMeter:
    """Measures what each kind of slack gave since the service started, against the same work
    without it.

    The activity sampler drives it. Time is in device seconds; money needs prices (`[prices]`).
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._capacity: dict[str, CapacityUse] = {}
        self._phases_alone_s = self._phases_used_s = 0.0
        self._seen_s: dict[JobId, float] = {}
        self._reserved_core_s = self._granted_core_s = 0.0

    def record_worker(self, kind: str, passed_s: float, *, busy: bool) -> None:
        """Add a worker of that kind, which was present and perhaps busy."""
        use = self._capacity.setdefault(kind, CapacityUse())
        use.present_s += passed_s
        use.busy_s += passed_s * busy

    def sample(self, passed_s: float) -> None:
        self._sample_phases(passed_s)
        environments, cores = self._plane.actions.cores_in_use()
        self._reserved_core_s += passed_s * environments
        self._granted_core_s += passed_s * cores

    def _sample_phases(self, passed_s: float) -> None:
        phases = self._plane.controller.phases
        if phases is None:
            return
        nodes_in_use: set[str] = set()
        living: dict[JobId, float] = {}
        for entry in self._plane.controller.jobs.entries():
            state = None if entry.stage.over else phases.scheduler.find(entry.job)
            if state is None or state.placement is None:
                continue
            nodes = (*state.placement.rollout_nodes, *state.placement.train_nodes)
            nodes_in_use.update(nodes)
            more_s = state.observed_s - self._seen_s.get(entry.job, 0.0)
            self._phases_alone_s += max(more_s, 0.0) * len(nodes)
            living[entry.job] = state.observed_s
        self._seen_s = living
        self._phases_used_s += passed_s * len(nodes_in_use)

    # ---- reports ----
    def capacity(self) -> list[dict[str, Any]]:
        """What is paid for: kinds of workers, their hours and, with prices, their cost."""
        prices = self._plane.settings.prices
        return [
            {
                "kind": kind,
                "present_h": round(use.present_s / _HOUR_S, 4),
                "busy": round(use.busy_s / max(use.present_s, 1e-9), 4),
                "dollars": _dollars(prices, kind, use.present_s),
            }
            for kind, use in self._capacity.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """By kind of slack; kinds that this service does not use are left out."""
        prices, gauges = self._plane.settings.prices, self._plane.controller.weights.gauges()
        found: list[dict[str, Any]] = []
        device, core = prices.device_per_h, prices.core_per_h
        if self._phases_used_s:
            alone, used = self._phases_alone_s / _HOUR_S, self._phases_used_s / _HOUR_S
            detail = "finished phases, on nodes of their own"
            paid = {"price": device, "used_price": device}
            found.append(slack_row("phases", "device h", alone, used, detail, **paid))
        if (borrowed := self._capacity.get(InstanceKind.BORROWED)) is not None:
            loans = self._plane.rollout.lending
            detail = f"{0 if loans is None else loans.loans} loans, paid for by the served model"
            alone = borrowed.busy_s / _HOUR_S
            found.append(slack_row("serving", "device h", alone, 0.0, detail, price=device))
        if (spot := self._capacity.get(InstanceKind.SPOT)) is not None:
            hours, cheap = spot.present_s / _HOUR_S, prices.spot_device_per_h
            detail = "the same hours at the price of spot"
            paid = {"price": device, "used_price": cheap}
            found.append(slack_row("spot", "device h", hours, hours, detail, **paid))
        if self._reserved_core_s:
            alone, used = self._reserved_core_s / _HOUR_S, self._granted_core_s / _HOUR_S
            detail = "a core for every open environment"
            paid = {"price": core, "used_price": core}
            found.append(slack_row("actions", "core h", alone, used, detail, **paid))
        if gauges["pulled_whole_bytes"]:
            alone, used = gauges["pulled_whole_bytes"] / 1e9, gauges["pulled_bytes"] / 1e9
            detail = f"{gauges['pulls_by_delta']:.0f} of {gauges['pulls']:.0f} pulls are deltas"
            found.append(slack_row("weights", "GB", alone, used, detail))
        return found


def _dollars(prices: PriceSettings, kind: str, present_s: float) -> float | None:
    if not prices.device_per_h:
        return None
    special = {"borrowed": 0.0, "spot": prices.spot_device_per_h}
    return round(special.get(kind, prices.device_per_h) * present_s / _HOUR_S, 4)
