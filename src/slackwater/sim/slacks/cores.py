"""Cores for tool calls and rewards: one for each action while it runs, granted by the action
broker, or one reserved for each trajectory's whole life.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

from slackwater.control.actions import commands, events
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.control.driver import Driver
from slackwater.model.action import ActionSpec, OutcomeKind, WorkerCapacity
from slackwater.model.amounts import CORES, Amounts, Need
from slackwater.model.ids import ActionId, JobId, NodeId
from slackwater.sim.fleet.context import FleetContext

_NODE = NodeId("cores")
_SLICES = 4  # how often running work adapts to the current pace
_ONE_CORE = (Need(CORES, Amounts.exactly(1)),)


class SimulatedCores:
    """`granted` counts the actions that the broker granted a core."""

    def __init__(self, fleet: FleetContext, cores: int, *, pooled: bool) -> None:
        self._fleet, self._cores, self._pooled, self._free = fleet, cores, pooled, cores
        self.broker = ActionBroker(BrokerSettings())
        self._driver: Driver[events.Event, commands.Command] = Driver(
            self.broker,
            self._execute,
            clock=lambda: fleet.now_s,
            schedule=fleet.queue.push_soon,
        )
        self._waiting: deque[Callable[[], None]] = deque()
        self._open: dict[ActionId, tuple[float, Callable[[], None]]] = {}
        self._running: dict[ActionId, int] = {}
        self.granted = 0
        self._join()

    def _join(self) -> None:
        capacity = WorkerCapacity((tuple(range(self._cores)),), 1 << 20)
        self._driver.feed(events.WorkerJoined(self._fleet.now_s, _NODE, capacity))

    @property
    def used(self) -> int:
        """Actions that run."""
        return len(self._running)

    def begin(self, then: Callable[[], None]) -> None:
        """Begin a trajectory; without pooling it waits for a core of its own."""
        if self._pooled:
            then()
        elif self._free:
            self._free -= 1
            then()
        else:
            self._waiting.append(then)

    def end(self) -> None:
        """End a trajectory."""
        if self._pooled:
            return
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1

    def act(self, name: str, job: JobId, seconds: float, then: Callable[[], None]) -> None:
        """Run an action, then call `then`."""
        if not self._pooled:
            self._fleet.after(seconds, then)
            return
        spec = ActionSpec(ActionId(name), job, "tool", _ONE_CORE)
        self._open[spec.action] = (seconds, then)
        self._driver.feed(events.ActionSubmitted(self._fleet.now_s, spec))

    def _execute(self, command: commands.Command) -> None:
        match command:
            case commands.StartAction(spec, attempt):
                self.granted += 1
                self._running[spec.action] = attempt
                seconds = self._open[spec.action][0]
                self._run(spec.action, attempt, seconds, _SLICES)
            case commands.EndAction(action, outcome):
                seconds, then = self._open.pop(action)
                self._running.pop(action, None)
                if outcome.kind is OutcomeKind.DONE:
                    self._fleet.after(0.0, then)
                else:  # its worker was lost: the client asks again
                    again = (f"{action}+", JobId(action.split(".", 1)[0]), seconds, then)
                    self._fleet.after(1.0, partial(self.act, *again))
            case _:
                pass

    def _run(self, action: ActionId, attempt: int, seconds: float, slices: int) -> None:
        """Run the remaining slices; the pace sets the length of each."""
        if slices and self._running.get(action) == attempt:
            slice_s = seconds / _SLICES / self._fleet.pace()
            again = partial(self._run, action, attempt, seconds, slices - 1)
            self._fleet.after(slice_s, again)
        else:
            self._finish(action, attempt, seconds)

    def _finish(self, action: ActionId, attempt: int, ran_s: float) -> None:
        if self._running.get(action) == attempt:
            now_s = self._fleet.now_s
            ended = events.ActionFinished(now_s, action, attempt, OutcomeKind.DONE, ran_s)
            self._driver.feed(ended)

    def lose_worker(self) -> None:
        """Lose the worker with its actions; another starts at once."""
        self._running.clear()
        self._driver.feed(events.WorkerLost(self._fleet.now_s, _NODE, "killed"))
        self._join()
