"""A model's versions on their way from a trainer to engines over a slow link, in virtual time, by
the director that runs live.

The link experiments of ROSE (6.3, F), RLBoost (4.3, 6.4.2) and WEAVE (5.2, 6) as scenarios: what
differs between them are inputs.
"""

from collections import deque
from dataclasses import dataclass

from benchmarks.weights.simulated.flat_source import FlatSource
from benchmarks.weights.simulated.links import Flow, Links
from slackwater.control.rollout.events import InstanceJoined, VersionRecalled
from slackwater.control.weights import commands as do
from slackwater.control.weights import events as on
from slackwater.control.weights.director import WeightDirector
from slackwater.model.ids import InstanceId, JobId, NodeId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.payload import Payload
from slackwater.policy.weights.source import TreeSource
from slackwater.sim.core.queue import EventQueue

_JOB = JobId("job")
_TRAINER = NodeId("trainer")
_SLOW = "slow"


@dataclass(frozen=True, slots=True)
class LinkScenario:
    """One trainer's node, and rollout nodes on one fast network behind a slow link. Bytes, seconds,
    bytes per second.

    `delta_bytes` 0: only wholes travel. `encode_s` passes before a version can be pulled. `flat`:
    every engine takes its own copy over the slow link. `join_s`: when each of more nodes joins,
    after the last version was published.
    """

    model_bytes: float
    slow: float
    fast: float
    nodes: int = 1
    engines_per_node: int = 1
    delta_bytes: float = 0.0
    encode_s: float = 0.0
    apply: float = 20e9
    flat: bool = False
    versions: int = 3
    join_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Of the last version: how long until every engine had it, what crossed, and when each newcomer
    was ready after it joined.
    """

    sync_s: float
    first_ready_s: float
    crossed_bytes: float
    by_delta: int
    newcomer_s: tuple[float, ...]


class WeightWorld:
    """The simulated body of one scenario."""

    def __init__(self, scenario: LinkScenario) -> None:
        self._scenario = scenario
        source = FlatSource() if scenario.flat else TreeSource()
        self.director = WeightDirector(source)
        nodes, engines = scenario.nodes, scenario.engines_per_node
        if scenario.flat:  # no relay is shared: every engine is on its own
            nodes, engines = nodes * engines, 1
        self._engines = {NodeId(f"n{n}"): engines for n in range(nodes + len(scenario.join_s))}
        self._at_first = list(self._engines)[:nodes]
        capacity = {_SLOW: scenario.slow}
        for node in (_TRAINER, *self._engines):
            capacity |= {f"in {node}": scenario.fast, f"out {node}": scenario.fast}
        self._links = Links(capacity)
        self._queue: EventQueue[on.WeightEvent] = EventQueue()
        self._flows: dict[tuple[NodeId, Payload], Flow] = {}
        self._here: dict[NodeId, set[Payload]] = {
            node: set() for node in (_TRAINER, *self._engines)
        }
        self._pulls: list[do.PullVersion] = []
        self._joined_s: dict[InstanceId, float] = {}
        self.ready_s: dict[tuple[InstanceId, str], float] = {}

    def run(self) -> SyncReport:
        """Publish version after version, each when all engines have the one before; then let
        newcomers in.
        """
        scenario = self._scenario
        self._tell(on.RelayJoined(0.0, _TRAINER, "train"))
        for node in self._at_first:
            self._join(node)
        began_s = crossed = 0.0
        for number in range(1, scenario.versions + 1):
            began_s, crossed = self._queue.now_s, self._links.carried[_SLOW]
            self._publish(number)
            if number == scenario.versions:
                crossed_before = crossed
                for node, later_s in zip(
                    list(self._engines)[len(self._at_first) :], scenario.join_s, strict=True
                ):
                    self._run_until(began_s + later_s)
                    self._join(node)
                    self._need(number)
            self._settle()
            self.director.check_integrity()
        last = f"v{scenario.versions}"
        ready = {name: at for (name, version), at in self.ready_s.items() if version == last}
        first = [at for name, at in ready.items() if self._joined_s[name] <= began_s]
        later = [
            at - self._joined_s[name]
            for name, at in ready.items()
            if self._joined_s[name] > began_s
        ]
        return SyncReport(
            max(first) - began_s,
            min(first) - began_s,
            self._links.carried[_SLOW] - crossed_before,
            int(self.director.gauges()["pulls_by_delta"]),
            tuple(later),
        )

    def _join(self, node: NodeId) -> None:
        now_s = self._queue.now_s
        self._tell(on.RelayJoined(now_s, node, str(node) if self._scenario.flat else "rollout"))
        for number in range(self._engines[node]):
            name = InstanceId(f"{node}.{number}")
            self._joined_s[name] = now_s
            spec = InstanceSpec(name, InstanceKind.DEDICATED, 64, 1000, 64_000, node=node)
            self._tell(InstanceJoined(now_s, spec))

    def _publish(self, number: int) -> None:
        scenario, version = self._scenario, f"v{number}"
        self._run_until(self._queue.now_s + scenario.encode_s)
        sizes = {"": int(scenario.model_bytes)}
        if scenario.delta_bytes and number > 1:
            sizes[f"v{number - 1}"] = int(scenario.delta_bytes)
        self._here[_TRAINER] |= {Payload(version, base) for base in sizes}
        now_s = self._queue.now_s
        self._tell(on.PayloadsStocked(now_s, _TRAINER, version, tuple(sizes.items())))
        self._tell(on.WeightsPublished(now_s, _JOB, version, line="model"))
        if number > 1:
            self._tell(on.VersionNeeded(now_s, _JOB, "", f"v{number - 1}", 0))
        self._need(number)

    def _need(self, number: int) -> None:
        self._tell(on.VersionNeeded(self._queue.now_s, _JOB, "", f"v{number}", 1 << 20))

    # ---- time ----
    def _settle(self) -> None:
        """Until nothing flows and nothing is applied any more."""
        while (next_s := self._next_s()) is not None:
            self._run_until(next_s)

    def _next_s(self) -> float | None:
        flows_s = self._links.next_s()
        times = [] if flows_s is None else [self._queue.now_s + flows_s]
        times += [self._queue.peek_s()] if len(self._queue) else []
        return min(times, default=None)

    def _run_until(self, until_s: float) -> None:
        while True:
            next_s = self._next_s()
            at_s = until_s if next_s is None else min(next_s, until_s)
            ended = self._links.advance(at_s - self._queue.now_s)
            self._queue.now_s = at_s
            for key in [key for key, flow in self._flows.items() if flow in ended]:
                del self._flows[key]
                self._here[key[0]].add(key[1])
                self._tell(on.PayloadArrived(at_s, key[0], key[1].version, key[1].base))
            while len(self._queue) and self._queue.peek_s() <= at_s:
                self._tell(self._queue.pop())
            if next_s is None or next_s >= until_s:
                return

    # ---- commands ----
    def _tell(self, event: on.WeightEvent) -> None:
        if isinstance(event, on.InstanceReady):
            self.ready_s[event.instance, event.version] = event.now_s
        commands = deque(self.director.handle(event))
        while commands:
            match command := commands.popleft():
                case do.FetchPayload(node, version, base, source):
                    self._bring(node, Payload(version, base), source)
                case do.DropPayload(node, version, base):
                    self._here[node].discard(Payload(version, base))
                case do.PullVersion():
                    self._pulls.append(command)
                case VersionRecalled(_, instance, version):
                    freed = on.VersionFreed(self._queue.now_s, instance, version)
                    commands += self.director.handle(freed)
                case _:
                    pass  # nothing runs here, and nothing is stored
        self._apply_what_is_here()

    def _bring(self, node: NodeId, payload: Payload, source: NodeId) -> None:
        size = self._scenario.delta_bytes if payload.base else self._scenario.model_bytes
        crosses = self._scenario.flat or source == _TRAINER
        links = (f"out {source}", f"in {node}") + ((_SLOW,) if crosses else ())
        flow = Flow(size, links, self._flows.get((source, payload)))
        self._flows[node, payload] = flow
        self._links.flows.append(flow)

    def _apply_what_is_here(self) -> None:
        """Engines apply what is on their node, each beside the others."""
        for pull in list(self._pulls):
            node = NodeId(pull.instance.rpartition(".")[0])
            assert pull.way, f"{pull.instance} was sent to the store, which is not simulated"
            if all(payload in self._here[node] for payload in pull.way):
                self._pulls.remove(pull)
                scenario = self._scenario
                came = sum(
                    scenario.delta_bytes if payload.base else scenario.model_bytes
                    for payload in pull.way
                )
                at_s = self._queue.now_s + came / scenario.apply
                ready = on.InstanceReady(at_s, pull.instance, pull.version, pull.keep)
                self._queue.push(at_s, ready)
