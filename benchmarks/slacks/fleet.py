"""One simulated fleet with all five kinds of slack on one clock, each of which can be switched off.

The fleet controller routes the turns of all jobs, the lender and the arbiters of serving devices
say what is lent, the action broker grants cores. Phases contend for one train pool and one link.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import numpy as np

from benchmarks.serving.simulated.cluster import ClusterPlan, ServingCluster
from benchmarks.serving.simulated.device_cost import SharedDevice
from benchmarks.serving.simulated.game_sessions import drawn_games
from benchmarks.serving.simulated.role import ServingRole
from benchmarks.serving.simulated.serving_trace import Arrival, drawn_arrivals
from slackwater.control.actions import commands as action_do
from slackwater.control.actions import events as action_on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.settings import BrokerSettings
from slackwater.control.fleet.controller import FleetController
from slackwater.control.fleet.messages import FleetCommand
from slackwater.control.rollout.commands import CompleteTurn, FailTurn
from slackwater.control.rollout.events import TurnSubmitted
from slackwater.control.rollout.settings import RolloutSettings
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.control.weights.events import WeightsPublished
from slackwater.model.action import ActionSpec, OutcomeKind, WorkerCapacity
from slackwater.model.amounts import CORES, Amounts, Need
from slackwater.model.ids import ActionId, InstanceId, JobId, NodeId, TrajectoryId, TurnId
from slackwater.model.instance import InstanceKind
from slackwater.model.sampling import Sampling
from slackwater.model.serving import ServingSlo
from slackwater.model.turn import TurnSpec
from slackwater.policy.serving.modes import mode_of
from slackwater.sim.core.queue import EventQueue
from slackwater.sim.rollout.agent_trace import Session
from slackwater.sim.rollout.body import BodySettings, SimulatedBody
from slackwater.sim.rollout.engine_cost import H800, QWEN3_8B, EngineCost
from slackwater.sim.rollout.extra_capacity import SpotCapacity
from slackwater.sim.rollout.spot_trace import SpotEvent, SpotRates

_END_S = 86_400.0
_CHECK_EVERY = 50  # events; a whole check of everything costs more than an event
_ENGINE = EngineCost(QWEN3_8B, H800, 1)
_ONE_CORE = (Need(CORES, Amounts.exactly(1)),)


class Slack(StrEnum):
    """Where a fleet's resources lie idle."""

    PHASES = "phases"
    SERVING = "serving"
    SPOT = "spot"
    ACTIONS = "actions"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class FiveSlacks:
    """A fleet, its jobs and its traces. `spot` and `arrivals` are drawn from the seed unless given.

    Without a kind of slack: each job has its share of engines and train nodes to itself (phases),
    no device is lent (serving), none preemptible (spot), every trajectory reserves a core for its
    whole life (actions), and every version is shipped whole (weights).
    """

    jobs: int = 2
    steps: int = 2
    trajectories: int = 32
    most_turns: int = 12
    engines: int = 4
    turns_per_engine: int = 8
    train_devices: int = 8
    train_s: float = 45.0
    serving_devices: int = 2
    arrivals: Sequence[Arrival] = ()
    arrivals_per_s: float = 2.0
    slo: ServingSlo = field(default_factory=lambda: ServingSlo(0.5, 0.15))
    spot: Sequence[SpotEvent] = ()
    spot_rates: SpotRates = field(default_factory=lambda: SpotRates(2.0, 12.0, 2.0))
    cores: int = 24
    reward_s: float = 4.0
    link_gb_per_s: float = 0.5
    changed_share: float = 0.03
    device_price_per_h: float = 5.0
    spot_price_per_h: float = 2.0
    core_price_per_h: float = 0.05


@dataclass(frozen=True, slots=True)
class FiveSlacksResult:
    """`completed_s` is when the last job ended; the counts say that each kind was used."""

    completed_s: float
    cost: float
    attainment: float
    moved_turns: int
    borrowed_turns: int
    spot_turns: int
    shared_turns: int
    actions: int
    deltas: int

    @property
    def kinds_seen(self) -> int:
        seen = (self.shared_turns, self.borrowed_turns, self.spot_turns, self.actions, self.deltas)
        return sum(count > 0 for count in seen)


class _Line:
    """Something that one job has at a time, in the order in which they asked."""

    def __init__(self, body: SimulatedBody) -> None:
        self._body, self._waiting, self._taken = (
            body,
            deque[tuple[float, Callable[[], None]]](),
            False,
        )

    def have(self, seconds: float, then: Callable[[], None]) -> None:
        """Have it for so long."""
        self._waiting.append((seconds, then))
        self._next()

    def _next(self) -> None:
        if self._taken or not self._waiting:
            return
        self._taken = True
        seconds, then = self._waiting.popleft()
        self._body.at(self._body.now_s + seconds, partial(self._over, then))

    def _over(self, then: Callable[[], None]) -> None:
        self._taken = False
        then()
        self._next()


class _Actions:
    """Tool calls and rewards: a core for each action, or for each trajectory's whole life."""

    def __init__(self, body: SimulatedBody, cores: int, *, pooled: bool) -> None:
        self._body, self._pooled, self._free = body, pooled, cores
        self._broker = ActionBroker(BrokerSettings())
        self._waiting: deque[Callable[[], None]] = deque()
        self._open: dict[ActionId, tuple[float, Callable[[], None]]] = {}
        self.granted = 0
        node = NodeId("cores")
        self._tell(
            action_on.WorkerJoined(0.0, node, WorkerCapacity((tuple(range(cores)),), 1 << 20))
        )

    def begin(self, then: Callable[[], None]) -> None:
        """A trajectory begins; one that must reserve a core waits for it."""
        if self._pooled:
            then()
        elif self._free:
            self._free -= 1
            then()
        else:
            self._waiting.append(then)

    def end(self) -> None:
        """A trajectory is over."""
        if self._pooled:
            return
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._free += 1

    def act(self, name: str, job: JobId, seconds: float, then: Callable[[], None]) -> None:
        """Run an action, and go on."""
        if not self._pooled:
            self._body.at(self._body.now_s + seconds, then)
            return
        spec = ActionSpec(ActionId(name), job, "tool", _ONE_CORE)
        self._open[spec.action] = (seconds, then)
        self._tell(action_on.ActionSubmitted(self._body.now_s, spec))

    def _tell(self, event: action_on.Event) -> None:
        for command in self._broker.handle(event):
            match command:
                case action_do.StartAction(spec, attempt):
                    self.granted += 1
                    ran_s = self._open[spec.action][0]
                    self._after(ran_s, spec.action, attempt)
                case action_do.EndAction(action, outcome):
                    assert outcome.kind is OutcomeKind.DONE, f"{action}: {outcome}"
                    self._body.at(self._body.now_s, self._open.pop(action)[1])
                case SetTimer(name, at_s):
                    self._body.at(at_s, partial(self._fire, name))
                case _:
                    pass

    def _after(self, ran_s: float, action: ActionId, attempt: int) -> None:
        done_s = self._body.now_s + ran_s
        finished = action_on.ActionFinished(done_s, action, attempt, OutcomeKind.DONE, ran_s)
        self._body.at(done_s, partial(self._tell, finished))

    def _fire(self, name: str) -> None:
        self._tell(TimerFired(self._body.now_s, name))

    def check_integrity(self) -> None:
        self._broker.check_integrity()


class FiveSlacksRun:
    """Sets everything up on one event queue; `run` lets it happen."""

    def __init__(self, plan: FiveSlacks, on: frozenset[Slack], seed: int = 0) -> None:
        self._plan, self._on, self._seed = plan, on, seed
        queue: EventQueue[Callable[[], None]] = EventQueue()
        self.controller = FleetController(RolloutSettings(turn_timeout_s=_END_S))
        links = BodySettings(borrowed_heartbeat_s=0.5)
        self.body = SimulatedBody(self.controller, queue, self._tokens, links)
        self.body.on_command = self._take
        self._jobs = [JobId(f"job{number}") for number in range(plan.jobs)]
        lends = mode_of("ours" if Slack.SERVING in on else "none")
        roles = (ServingRole.MIXED,) * plan.serving_devices
        self.cluster = ServingCluster(
            ClusterPlan(
                SharedDevice(_ENGINE, _ENGINE), plan.slo, roles, lends, len(roles), seed=seed
            ),
            self.body,
            plan.arrivals or drawn_arrivals(600.0, seed, rate=plan.arrivals_per_s),
        )
        self.actions = _Actions(self.body, plan.cores, pooled=Slack.ACTIONS in on)
        lines = 1 if Slack.PHASES in on else plan.jobs
        self._trains = [_Line(self.body) for _ in range(lines)]
        self._link = _Line(self.body)
        self._sessions: dict[TrajectoryId, Session] = {}
        self._of_turn: dict[TurnId, tuple[JobId, TrajectoryId, int, int]] = {}
        self._left: dict[JobId, int] = {}
        self._ended: dict[JobId, float] = {}
        self._home: dict[InstanceId, JobId] = {}
        self.turns = dict.fromkeys(("own", "shared", "borrowed", "spot"), 0)
        self.deltas = self._events = 0

    def _tokens(self, turn: TurnId) -> int:
        _, trajectory, _, index = self._of_turn[turn]
        return self._sessions[trajectory][index].output_tokens

    def run(self, check: bool = False) -> FiveSlacksResult:
        """Until the last job has ended, and every request that came is answered."""
        plan, body = self._plan, self.body
        body.tell(WeightsPublished(0.0, None, "v0"))
        for number in range(plan.engines):
            owner = self._jobs[number % plan.jobs]
            name = InstanceId(f"e{number}")
            self._home[name] = owner
            body.join(
                name,
                InstanceKind.DEDICATED,
                _ENGINE,
                max_running=plan.turns_per_engine,
                job=None if Slack.PHASES in self._on else owner,
                holds="v0",
            )
        trace = plan.spot or plan.spot_rates.draw(self._seed)
        if Slack.SPOT in self._on:
            SpotCapacity(trace, plan.turns_per_engine).attach(body, _ENGINE)
        body.at(0.0, partial(self.cluster.start, 600.0))
        for number, job in enumerate(self._jobs):
            body.at(5.0 * number, partial(self._roll_out, job, 0))
        body.run_until(_END_S, partial(self._over, check))
        assert len(self._ended) == plan.jobs, f"only {sorted(self._ended)} ended"
        return self._result(trace)

    def _over(self, check: bool) -> bool:
        self._events += 1
        if check and self._events % _CHECK_EVERY == 0:
            self.controller.check_integrity()
            self.cluster.check_integrity()
            self.actions.check_integrity()
        if len(self._ended) == self._plan.jobs:
            self.cluster.closed = True
        return self.cluster.closed and not self.cluster.unanswered

    # ---- a job ----
    def _roll_out(self, job: JobId, step: int) -> None:
        plan = self._plan
        place = self._jobs.index(job)
        games = drawn_games(plan.trajectories, self._seed * 1000 + place * 100 + step)
        self._left[job] = len(games)
        self.cluster.want(job, plan.serving_devices)
        for number, game in enumerate(games):
            trajectory = TrajectoryId(f"{job}.{step}.{number}")
            self._sessions[trajectory] = game[: plan.most_turns]
            self.actions.begin(partial(self._submit, job, trajectory, step, 0))

    def _submit(self, job: JobId, trajectory: TrajectoryId, step: int, index: int) -> None:
        wanted = self._sessions[trajectory][index]
        turn = TurnId(f"{trajectory}.{index}")
        self._of_turn[turn] = (job, trajectory, step, index)
        self.body.trajectory_of[turn] = trajectory
        sampling = Sampling(max_tokens=wanted.output_tokens)
        prompt = range(wanted.prompt_tokens)
        spec = TurnSpec(turn, trajectory, job, prompt, sampling, "v0")
        self.body.tell(TurnSubmitted(self.body.now_s, spec))

    def _take(self, command: FleetCommand) -> None:
        match command:
            case CompleteTurn(turn):
                self._answered(turn)
            case FailTurn(turn, error):
                raise AssertionError(f"{turn} failed: {error}")
            case _:
                pass

    def _answered(self, turn: TurnId) -> None:
        job, trajectory, step, index = self._of_turn[turn]
        self._count(job, trajectory)
        session = self._sessions[trajectory]
        if index + 1 < len(session):
            go_on = partial(self._submit, job, trajectory, step, index + 1)
            self.actions.act(turn, job, session[index].pause_s + 1e-3, go_on)
        else:
            done = partial(self._rewarded, job, step)
            self.actions.act(f"{trajectory}.reward", job, self._plan.reward_s, done)

    def _count(self, job: JobId, trajectory: TrajectoryId) -> None:
        """Where the turn that is complete was sampled last."""
        home = self.controller.rollout.books.dispatcher.homes.instance_of(trajectory)
        if home is None:
            return
        if home in self._home:
            self.turns["own" if self._home[home] == job else "shared"] += 1
        else:
            self.turns["borrowed" if "#" in home else "spot"] += 1

    def _rewarded(self, job: JobId, step: int) -> None:
        self.actions.end()
        self._left[job] -= 1
        if not self._left[job]:
            self.cluster.release(job)
            place = self._jobs.index(job) % len(self._trains)
            shared = len(self._trains) == 1
            seconds = self._plan.train_s * (1 if shared else self._plan.jobs)
            self._trains[place].have(seconds, partial(self._trained, job, step))

    def _trained(self, job: JobId, step: int) -> None:
        delta = Slack.WEIGHTS in self._on
        share = self._plan.changed_share if delta else 1.0
        self.deltas += delta
        seconds = share * _ENGINE.weight_bytes / 1e9 / self._plan.link_gb_per_s
        self._link.have(seconds, partial(self._shipped, job, step))

    def _shipped(self, job: JobId, step: int) -> None:
        if step + 1 < self._plan.steps:
            self._roll_out(job, step + 1)
        else:
            self._ended[job] = self.body.now_s

    # ---- what it came to ----
    def _result(self, trace: Sequence[SpotEvent]) -> FiveSlacksResult:
        plan, completed_s = self._plan, max(self._ended.values())
        hours = completed_s / 3600
        devices = plan.engines + plan.train_devices
        cost = hours * (devices * plan.device_price_per_h + plan.cores * plan.core_price_per_h)
        if Slack.SPOT in self._on:
            cost += _held_h(trace, completed_s) * plan.spot_price_per_h
        requests = [one for one in self.cluster.requests if one.arrival_s <= completed_s]
        met = [plan.slo.met(one.ttft_s, one.tpot_s) for one in requests]
        return FiveSlacksResult(
            completed_s,
            cost,
            float(np.mean(met)) if met else 1.0,
            self.controller.rollout.books.counters.moved,
            self.turns["borrowed"],
            self.turns["spot"],
            self.turns["shared"],
            self.actions.granted,
            self.deltas,
        )


def _held_h(trace: Sequence[SpotEvent], until_s: float) -> float:
    """Instance hours of a spot trace up to a moment."""
    since: dict[str, float] = {}
    held_s = 0.0
    for row in trace:
        if row.t_s >= until_s:
            break
        if row.event == "add":
            since[row.instance_id] = row.t_s
        else:
            held_s += row.t_s - since.pop(row.instance_id)
    return (held_s + sum(until_s - began_s for began_s in since.values())) / 3600
