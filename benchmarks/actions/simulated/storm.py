"""A storm of faults over the action broker, from a seed: the invariants are checked after every
event.

Jobs open environments and submit every kind of action; workers join, die and lose environments,
actions outlive their stop, owners change their minds, limits change, the broker itself is killed
and comes back from its log. Every submitted action must end in exactly one outcome, no limit may be
exceeded in any window, and when the storm is over everything must end.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.actions.simulated.baselines import ShortFirst
from benchmarks.actions.simulated.elastic import ElasticScheduling
from benchmarks.actions.simulated.storm_workers import StormWorkers
from harness.broker_checks import check_broker
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.control.driver import Driver
from slackwater.model.action import (
    ActionSpec,
    EnvironmentSpec,
    GpuService,
    Limit,
    Outcome,
    OutcomeKind,
    ServiceShape,
)
from slackwater.model.amounts import CORES, GPUS, MEMORY_MIB, Amounts, Efficiency, Elastic, Need
from slackwater.model.ids import (
    NOBODY,
    ActionId,
    EnvironmentId,
    JobId,
    ResourceName,
    ServiceName,
    TenantId,
)
from slackwater.sim.core.queue import EventQueue

WEB, PDF = ResourceName("web"), ResourceName("pdf")
LIMITS = (Limit(WEB, concurrency=6, quota=20, window_s=10.0), Limit(PDF, concurrency=3))
SERVICES = tuple(
    GpuService(
        ServiceName(f"judge{i}"),
        tuple(ServiceShape(gpus, 60_000 // gpus, 0.5) for gpus in (1, 2, 4, 8)),
    )
    for i in range(5)
)


@dataclass(frozen=True, slots=True)
class StormReport:
    """What a storm came to."""

    seed: int
    events: int
    submitted: int
    outcomes: dict[OutcomeKind, int]
    restarts: int


class Storm:
    """One seeded run."""

    def __init__(self, seed: int, settings: BrokerSettings | None = None, tenants: int = 1) -> None:
        self.seed = seed
        self.tenants = tenants
        self.rng = np.random.default_rng(seed)
        order = BrokerSettings(ElasticScheduling(), max_waiting=400, return_s=20.0)
        if seed % 2:
            order = BrokerSettings(order=ShortFirst(), max_waiting=400, return_s=20.0)
        self.settings = settings or order
        self.broker = ActionBroker(self.settings)
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        self.workers = StormWorkers(self.rng, self.happen, self.after, lambda: self.queue.now_s)
        self.log: dict[ActionId, tuple[ActionSpec, float]] = {}
        self.started: set[ActionId] = set()
        self.open: dict[EnvironmentId, EnvironmentSpec] = {}
        self.outcomes: dict[ActionId, OutcomeKind] = {}
        self.used: dict[ResourceName, list[tuple[float, int]]] = {WEB: [], PDF: []}
        self.raging = True
        self.restarts = self._earlier_events = 0
        self._serial = 0
        self.driver = self._new_driver()

    def run(self, minutes: float) -> StormReport:
        """Rage for so long, then calm down and see that everything ends."""
        for limit in LIMITS:
            self.happen(on.LimitDeclared(0.0, limit))
        for service in SERVICES:
            self.happen(on.ServiceDeclared(0.0, service))
        for _ in range(3):
            self.workers.join()
        self._again(0.15, self._submit)
        self._again(0.8, self._ask_environment)
        self._again(1.0, self._cancel)
        self._again(3.0, self._close_environment)
        self._again(9.0, self.workers.lose_environment)
        self._again(15.0, self._change_workers)
        self._again(60.0, self._restart)
        self._run_until(minutes * 60)
        self.raging = False
        while not any(w.capacity.gpus and w.capacity.cores for w in self.workers.workers.values()):
            self.workers.join()
        for name in list(self.open):
            self.happen(on.EnvironmentClosed(self.queue.now_s, name))
        self._run_until(self.queue.now_s + 3600, lambda: not self.log)
        assert not self.log, f"{len(self.log)} actions never ended"
        self._run_until(self.queue.now_s + 60)
        assert not self.broker.state.attempts, "an attempt still holds something"
        self._check_quota()
        counted = dict.fromkeys(OutcomeKind, 0)
        for kind in self.outcomes.values():
            counted[kind] += 1
        events = self._earlier_events + self.driver.events
        return StormReport(self.seed, events, len(self.outcomes), counted, self.restarts)

    # ---- the queue ----
    def _run_until(self, end_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        while len(self.queue) and self.queue.now_s < end_s and not stop():
            self.queue.pop()()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self.queue.push(self.queue.now_s + seconds, happen)

    def _again(self, mean_s: float, do_it: Callable[[], None]) -> None:
        def once() -> None:
            if self.raging:
                do_it()
                self.after(float(self.rng.exponential(mean_s)), once)

        self.after(float(self.rng.exponential(mean_s)), once)

    def _new_driver(self) -> Driver[on.Event, do.Command]:
        """Of the present broker; its invariants are checked after every event."""
        return Driver(
            self.broker,
            self._execute,
            clock=lambda: self.queue.now_s,
            schedule=self.queue.push_soon,
            handled=partial(check_broker, self.broker),
        )

    def happen(self, event: on.Event) -> None:
        """Tell the broker; what follows from it waits its turn."""
        self.driver.feed(event)

    def _execute(self, command: do.Command) -> None:
        match command:
            case do.StartAction(spec, _, _):
                self.started.add(spec.action)
                for need in spec.needs:
                    if need.resource in self.used:
                        use = (self.queue.now_s, need.amounts.least)
                        self.used[need.resource].append(use)
                self.workers.start(command)
            case do.StopAction():
                self.workers.stop(command)
            case do.EndAction(action, outcome):
                self._end(action, outcome)
            case do.OpenEnvironment():
                self.workers.open(command)
            case do.CloseEnvironment():
                self.workers.close(command)
            case do.EndEnvironment(environment, _):
                self.open.pop(environment, None)
            case do.EvictService():
                self.workers.evict(command)
            case do.RestoreService():
                self.workers.restore(command)

    def _end(self, action: ActionId, outcome: Outcome) -> None:
        assert action not in self.outcomes, f"{action} ended twice"
        self.outcomes[action] = outcome.kind
        del self.log[action]

    # ---- what people do ----
    def _submit(self) -> None:
        self._serial += 1
        spec = self._draw(ActionId(f"a{self._serial}"))
        self.log[spec.action] = (spec, self.queue.now_s)
        self.happen(on.ActionSubmitted(self.queue.now_s, spec))

    def _draw(self, name: ActionId) -> ActionSpec:
        rng = self.rng
        return replace(
            self._draw_kind(name, JobId(f"j{int(rng.integers(3))}")),
            single_unit_s=float(rng.uniform(0.5, 9)) if rng.random() < 0.5 else None,
            deadline_s=float(rng.uniform(5, 60)) if rng.random() < 0.5 else None,
            limit_s=float(rng.uniform(1, 10)) if rng.random() < 0.3 else None,
            priority=int(rng.integers(-1, 2)),
            tenant=self._tenant(),
        )

    def _tenant(self) -> TenantId:
        """Whose the next one is."""
        return TenantId(f"t{self._serial % self.tenants}") if self.tenants > 1 else NOBODY

    def _draw_kind(self, name: ActionId, job: JobId) -> ActionSpec:
        rng = self.rng
        kind = str(rng.choice(["shell", "test", "judge", "search"]))
        environments = list(self.open)
        elastic = Elastic(CORES, Efficiency.amdahl(0.9, 8))
        cores = Need(CORES, Amounts.from_range(1, int(rng.integers(1, 9))))
        if kind in ("shell", "test") and environments:
            home = environments[int(rng.integers(len(environments)))]
            limits = (Need(WEB, Amounts.exactly(1)),) if rng.random() < 0.2 else ()
            shared = elastic if kind == "test" else None
            return ActionSpec(name, job, kind, (cores, *limits), home, elastic=shared)
        if kind == "judge":
            sizes = Amounts.from_choices(*([1, 2, 4, 8][: int(rng.integers(1, 5))]))
            service = SERVICES[int(rng.integers(len(SERVICES)))].service
            split = Elastic(GPUS, Efficiency.amdahl(0.95, 8))
            needs = (Need(GPUS, sizes),)
            return ActionSpec(name, job, kind, needs, None, service, split, retries=2)
        if kind == "search":
            needs = (Need(WEB, Amounts.exactly(int(rng.integers(1, 4)))),)
            if rng.random() < 0.4:
                return ActionSpec(name, job, kind, (*needs, Need(PDF, Amounts.exactly(1))))
            return ActionSpec(name, job, kind, needs)
        memory = Need(MEMORY_MIB, Amounts.exactly(int(rng.integers(0, 6000))))
        retries = int(rng.integers(3))
        return ActionSpec(name, job, kind, (cores, memory), elastic=elastic, retries=retries)

    def _ask_environment(self) -> None:
        self._serial += 1
        name = EnvironmentId(f"e{self._serial}")
        memory_mib = int(self.rng.integers(100, 4000))
        spec = EnvironmentSpec(name, JobId("j0"), memory_mib, tenant=self._tenant())
        self.open[name] = spec
        self.happen(on.EnvironmentRequested(self.queue.now_s, spec))

    def _cancel(self) -> None:
        if self.log:
            names = list(self.log)
            self.happen(
                on.ActionCancelled(self.queue.now_s, names[int(self.rng.integers(len(names)))])
            )

    def _close_environment(self) -> None:
        if self.open:
            name = list(self.open)[int(self.rng.integers(len(self.open)))]
            del self.open[name]
            self.happen(on.EnvironmentClosed(self.queue.now_s, name))

    def _change_workers(self) -> None:
        nodes = list(self.workers.workers)
        if nodes and self.rng.random() < len(nodes) / 6:
            self.workers.kill(nodes[int(self.rng.integers(len(nodes)))])
        else:
            self.workers.join()

    def _restart(self) -> None:
        """The broker is killed; a fresh one gets the log, then the workers come back."""
        self.restarts += 1
        now_s = self.queue.now_s
        self.broker = ActionBroker(self.settings)
        self._earlier_events += self.driver.events
        self.driver.close()
        self.driver = self._new_driver()
        self.workers.stop_all()
        self.used = {WEB: [], PDF: []}
        for limit in LIMITS:
            self.happen(on.LimitDeclared(now_s, limit))
        for service in SERVICES:
            self.happen(on.ServiceDeclared(now_s, service))
        for environment in list(self.open.values()):
            self.happen(on.EnvironmentAdopted(now_s, environment))
        for action, (spec, submitted_s) in list(self.log.items()):
            started = action in self.started
            self.happen(on.ActionAdopted(now_s, spec, submitted_s, started))
        self.workers.rejoin()

    def _check_quota(self) -> None:
        for limit in LIMITS:
            uses = self.used[limit.resource]
            if limit.quota is None:
                continue
            for i, (since_s, _) in enumerate(uses):
                inside = [units for at_s, units in uses[i:] if at_s < since_s + limit.window_s]
                assert sum(inside) <= limit.quota, f"{limit.resource} over its quota"


def weather(seed: int, minutes: float = 5.0) -> StormReport:
    """Run one storm."""
    return Storm(seed).run(minutes)
