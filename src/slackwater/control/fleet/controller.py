"""The fleet controller: the controllers of a fleet as components of one, live and simulated.

    events -> controller.handle(event) -> commands

One routing table says which components consume a message, by its type. A message that a component
emits and another consumes stays inside and is handled before `handle` returns; every other message
is a command for the runtime. The phase controller also observes some messages as they are emitted,
so that a job's gates open or close before anything else follows.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, get_args

from slackwater.control.coschedule.phase_controller import PhaseController
from slackwater.control.coschedule.phase_cycle import COSCHEDULE
from slackwater.control.coschedule.phase_watch import PhaseLimits
from slackwater.control.coschedule.scheduler import CoScheduler
from slackwater.control.devices import messages as device_messages
from slackwater.control.devices.allocator import DeviceAllocator
from slackwater.control.fleet.messages import EVENT_TYPES, FleetCommand, FleetEvent
from slackwater.control.jobs import driver_events
from slackwater.control.jobs import events as job_events
from slackwater.control.jobs.drivers import DRIVER, DriverRegistry
from slackwater.control.jobs.registry import JobRegistry
from slackwater.control.lending import demand
from slackwater.control.lending.lender import REVIEW, LendingController
from slackwater.control.operations import events as operation_events
from slackwater.control.operations.controller import (
    OPERATIONS,
    DeviceOwnership,
    OperationsController,
)
from slackwater.control.operations.settings import OperationsConfig
from slackwater.control.rollout import events as rollout_events
from slackwater.control.rollout.commands import ReleaseInstance
from slackwater.control.rollout.facts import InstanceReleased
from slackwater.control.rollout.instances import InstanceRecord
from slackwater.control.rollout.manager import RolloutManager
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.steps import events as step_events
from slackwater.control.steps.tracker import REST, STEP, StepTracker
from slackwater.control.timer import TimerFired
from slackwater.control.weights import events as weight_events
from slackwater.control.weights.director import WeightDirector
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.placement import is_within

Handler = Callable[[Any], Sequence[Any]]

_SIGNS_OF_LIFE = (rollout_events.InstanceJoined, rollout_events.InstanceHeartbeat)


class FleetController:
    """See the module. Anybody may look at the components; only this class feeds them."""

    def __init__(
        self,
        settings: RolloutSettings | None = None,
        *,
        profiles_jobs: bool = False,
        coscheduler: CoScheduler | None = None,
        limits: PhaseLimits | None = None,
        operations: OperationsConfig | None = None,
        lending: LendingController | None = None,
    ) -> None:
        """With a `coscheduler` jobs that have terms share nodes phase by phase, within `limits`.
        With `lending` rollouts borrow the nodes of services.
        """
        self.rollout = RolloutManager(settings)
        self.operations = OperationsController(operations)
        self.devices = DeviceOwnership()
        self.allocator = DeviceAllocator()
        self.weights = WeightDirector()
        self.steps = StepTracker()
        profiles = profiles_jobs or coscheduler is not None
        self.jobs = JobRegistry(profiles=profiles, idle_after_s=(limits or PhaseLimits()).gone_s)
        self.drivers = DriverRegistry()
        self.lending = lending
        self.phases: PhaseController | None = None
        if coscheduler is not None:
            self.phases = PhaseController(coscheduler, self._engines_on, limits)
        self._routes = self._table()
        self._sole = {kind: to[0] for kind, to in self._routes.items() if len(to) == 1}
        self._heard_at_once = frozenset(() if self.phases is None else self.phases.OBSERVES)

    def _table(self) -> dict[type, tuple[Handler, ...]]:
        """Message type -> the components that consume it, in order."""
        lending: Handler = _ignore if self.lending is None else self.lending.handle
        phases: Handler = _ignore if self.phases is None else self.phases.handle
        consumers: tuple[tuple[Handler, Collection[type]], ...] = (
            (self.rollout.handle, get_args(rollout_events.RolloutEvent)),
            (self.operations.handle, get_args(operation_events.Event)),
            (self.devices.handle, get_args(device_messages.DeviceEvent)),
            (self.allocator.handle, get_args(device_messages.AllocationEvent)),
            (self.jobs.handle, get_args(job_events.JobEvent)),
            (phases, PhaseController.CONSUMES.values()),
            (self.weights.handle, get_args(weight_events.WeightEvent)),
            (self.steps.handle, get_args(step_events.StepEvent)),
            (self.drivers.handle, get_args(driver_events.DriverEvent)),
            (lending, get_args(demand.LoanEvent)),
        )
        self._timers: dict[str, Handler] = {  # by the beginning of a timer's name
            COSCHEDULE: phases,
            DRIVER: self.drivers.handle,
            STEP: self.steps.handle,
            REST: self.steps.handle,
            REVIEW: lending,
            **dict.fromkeys(OPERATIONS, self.operations.handle),
        }
        table: dict[type, tuple[Handler, ...]] = {}
        for kind in EVENT_TYPES.values():
            found = tuple(handler for handler, kinds in consumers if kind in kinds)
            table[kind] = tuple(handler for handler in found if handler != _ignore) or found
        return {**table, TimerFired: (self._timer_fired,)}

    def handle(self, event: FleetEvent) -> Sequence[FleetCommand]:
        """Take one event; return what the runtime must do, in order."""
        if isinstance(event, _SIGNS_OF_LIFE) and self._is_stale(event):
            return ()
        if (handler := self._sole.get(type(event))) is not None:  # so are turns and their tokens
            commands = handler(event)
            return self._settle(deque(), commands, event.now_s) if commands else ()
        return self._settle(deque((event,)), (), event.now_s)

    def _settle(
        self, inbox: deque[Any], messages: Sequence[Any], now_s: float
    ) -> list[FleetCommand]:
        """Deliver messages between components until none is left; return the commands."""
        out: list[FleetCommand] = []
        routes = self._routes
        if messages:
            self._route(messages, now_s, inbox, out)
        while inbox:
            message = inbox.popleft()
            emitted: list[Any] = []
            for handler in routes[type(message)]:
                emitted += handler(message)
            if emitted:
                self._route(emitted, now_s, inbox, out)
        return out

    def _route(
        self, messages: Sequence[Any], now_s: float, inbox: deque[Any], out: list[FleetCommand]
    ) -> None:
        """Queue messages that components consume; the others are commands."""
        routes, heard_at_once = self._routes, self._heard_at_once
        for message in messages:
            kind = type(message)
            if kind in heard_at_once and self.phases is not None:
                self._route(self.phases.observe(message, now_s), now_s, inbox, out)
                if kind in PhaseController.CLAIMS:
                    continue
            if kind in routes:
                inbox.append(message)
            elif kind is ReleaseInstance:
                local = self.steps.is_local(message.instance)
                # An engine on the trainers' devices is not ended: it rests until it is started.
                inbox.append(InstanceReleased(now_s, message.instance, local, message.reason))
                if not local:
                    out.append(message)
            else:
                out.append(message)

    def _is_stale(
        self, event: rollout_events.InstanceJoined | rollout_events.InstanceHeartbeat
    ) -> bool:
        """Whether the message is of a local engine that was told to rest meanwhile."""
        match event:
            case rollout_events.InstanceJoined(_, spec):
                instance = spec.instance
            case rollout_events.InstanceHeartbeat(_, instance):
                pass
        return self.steps.is_local(instance) and not self.steps.is_started(instance)

    def _timer_fired(self, event: TimerFired) -> Sequence[Any]:
        """Route by the beginning of the timer's name; other names are the rollout manager's."""
        for beginning, handler in self._timers.items():
            if event.name.startswith(beginning):
                return handler(event)
        return self.rollout.handle(event)

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant of a component, or between two, is broken."""
        for component in self.components():
            component.check_integrity()
        self.check_agreement()

    def components(self) -> Sequence[Any]:
        """All components; each changes only by the messages that it handles."""
        every = (
            self.rollout,
            self.operations,
            self.devices,
            self.allocator,
            self.weights,
            self.steps,
            self.jobs,
            self.drivers,
            self.phases,
            self.lending,
        )
        return [component for component in every if component is not None]

    def check_agreement(self) -> None:
        """Raise AssertionError if two components contradict each other."""
        for record in self.rollout.state.instances:
            instance = record.spec.instance
            usable = self.weights.usable(instance)
            assert record.versions == usable, f"{instance}: {record.versions} offered as {usable}"
            local = self.steps.is_local(instance)
            assert not local or self.steps.is_started(instance), f"{instance} works unasked"
        held, holders = self.devices.holders(), self.steps.holders()
        assert held.keys() <= holders.keys(), f"{held} work without devices: {holders}"
        for version, turns in self.rollout.dispatcher.demand.counts().items():
            assert self.weights.knows(version), f"{turns} turns ask for {version}, which is gone"

    def _engines_on(self, nodes: Sequence[NodeId], job: JobId) -> list[InstanceId]:
        """Instances of nodes, those with most of a job's turns first."""
        found = [
            record
            for record in self.rollout.state.instances
            if (place := record.spec.place) is not None
            and any(is_within(place, node) for node in nodes)
            and record.spec.job in (None, job)
        ]

        def rank(record: InstanceRecord) -> tuple[int, InstanceId]:
            mine = sum(turn.spec.job == job for turn in record.attempts.values())
            return -mine, record.spec.instance

        return [record.spec.instance for record in sorted(found, key=rank)]

    def gauges(self) -> dict[str, float]:
        return {
            **{f"rollout_{name}": value for name, value in self.rollout.gauges().items()},
            **{f"weights_{name}": value for name, value in self.weights.gauges().items()},
        }


def _ignore(message: object) -> Sequence[Any]:
    """Handle a message whose component the fleet does not have."""
    return ()
