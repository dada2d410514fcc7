"""Tenants share the cores by weight: whoever floods delays itself; one tenant alone sees its old
order exactly."""

import gzip
from collections import defaultdict
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.actions.simulated.baselines import LeastEach, ShortFirst
from benchmarks.actions.simulated.elastic import ElasticScheduling
from benchmarks.actions.simulated.storm import Storm
from harness.broker_checks import check_broker
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.control.record import replay
from slackwater.model.action import ActionSpec, EnvironmentSpec, Limit, OutcomeKind, WorkerCapacity
from slackwater.model.amounts import CORES, MEMORY_MIB, Amounts, Efficiency, Elastic, Need
from slackwater.model.ids import ActionId, EnvironmentId, JobId, NodeId, ResourceName, TenantId
from slackwater.model.tenant_limits import TenantLimits, TenantTable

A, B, C = TenantId("a"), TenantId("b"), TenantId("c")
NODE = NodeId("n0")


def spec(name: str, tenant: TenantId, units: int = 1, **fields: object) -> ActionSpec:
    needs = (Need(CORES, Amounts.exactly(units)),)
    job = JobId(f"{tenant}/{name}")  # every action in a job of its own: jobs buy nothing
    made = ActionSpec(ActionId(name), job, "k", needs, tenant=tenant)
    return replace(made, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Piece:
    """An action to come: who, when, on how many cores, how long it takes and how long it says that
    it takes."""

    tenant: TenantId
    at_s: float
    units: int = 1
    run_s: float = 1.0
    claims_s: float | None = None
    priority: int = 0


class Machine:
    """One node in virtual time, and what each tenant got of it."""

    def __init__(self, cores: int, broker: BrokerSettings) -> None:
        self.broker = ActionBroker(broker)
        self.cores = cores
        self.now_s = 0.0
        self.started_s: dict[str, float] = {}
        self.used_s: defaultdict[TenantId, float] = defaultdict(float)
        self.idle_while_waiting = 0
        self._events: list[tuple[float, int, object]] = []
        self._number = 0
        self._pieces: dict[str, Piece] = {}
        self.tell(on.WorkerJoined(0.0, NODE, WorkerCapacity((tuple(range(cores)),), 1000)))

    def run(self, pieces: list[Piece], until_s: float = 1e9) -> None:
        for i, piece in enumerate(pieces):
            self._pieces[f"{piece.tenant}{i}"] = piece
            self._push(piece.at_s, f"{piece.tenant}{i}")
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heappop(self._events)
            self.tell(self._event(what))
            books = self.broker.state
            free = self.cores - sum(len(a.grant.cores) for a in books.attempts.values())
            self.idle_while_waiting += bool(free and books.waiting)

    def _event(self, what: object) -> on.Event:
        if isinstance(what, str):
            piece = self._pieces[what]
            told = {"single_unit_s": piece.claims_s, "priority": piece.priority}
            return on.ActionSubmitted(self.now_s, spec(what, piece.tenant, piece.units, **told))
        assert isinstance(what, do.StartAction)
        piece = self._pieces[what.spec.action]
        self.used_s[piece.tenant] += piece.units * piece.run_s
        done = OutcomeKind.DONE
        return on.ActionFinished(self.now_s, what.spec.action, what.attempt, done, piece.run_s)

    def tell(self, event: on.Event) -> None:
        for command in self.broker.handle(event):
            if isinstance(command, do.StartAction):
                self.started_s[command.spec.action] = self.now_s
                self._push(self.now_s + self._pieces[command.spec.action].run_s, command)
        if self.broker.state.waiting < 60:  # it looks at everybody who waits
            check_broker(self.broker)

    def _push(self, at_s: float, what: object) -> None:
        self._number += 1
        heappush(self._events, (at_s, self._number, what))


def shares(**weights: float) -> BrokerSettings:
    named = {name: TenantLimits(weight=weight) for name, weight in weights.items()}
    return BrokerSettings(LeastEach(), tenants=TenantTable(named=named))


def waits(machine: Machine, tenant: TenantId) -> list[float]:
    return [
        at_s - machine._pieces[name].at_s
        for name, at_s in machine.started_s.items()
        if machine._pieces[name].tenant == tenant
    ]


@pytest.mark.parametrize("claims_s", [None, 1e-3, 1e5])
def test_a_flood_with_high_priority_delays_nobody_else(claims_s: float | None) -> None:
    """Neither many job names, nor priority, nor what it says of its durations helps."""
    flood = [Piece(A, 0.0, run_s=1.0, priority=1000, claims_s=claims_s) for _ in range(200)]
    quiet = [Piece(B, 1.5 + 3.0 * i, run_s=0.5) for i in range(12)]
    machine = Machine(4, shares())
    machine.run(flood + quiet)
    assert max(waits(machine, B)) <= 1.0  # until the first of the flood's actions ends
    assert len(machine.started_s) == 212


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_two_that_always_have_work_get_their_weights(weight: float) -> None:
    pieces = [Piece(A, 0.0, run_s=0.7) for _ in range(300)]
    pieces += [Piece(B, 0.0, run_s=2.0, claims_s=0.01) for _ in range(300)]
    machine = Machine(4, shares(b=weight))
    machine.run(pieces, until_s=50.0)
    assert machine.used_s[B] / machine.used_s[A] == pytest.approx(weight, rel=0.1)


def test_who_was_alone_owes_nothing_and_who_was_away_has_saved_nothing() -> None:
    pieces = [Piece(A, 0.0, run_s=1.0) for _ in range(300)]
    pieces += [Piece(B, 30.0, run_s=1.0) for _ in range(150)]
    machine = Machine(4, shares())
    machine.run(pieces, until_s=30.0)
    before = dict(machine.used_s)
    machine.run([], until_s=60.0)
    gained = {name: used_s - before.get(name, 0.0) for name, used_s in machine.used_s.items()}
    assert gained[A] / gained[B] == pytest.approx(1.0, rel=0.1)


PIECES = st.lists(
    st.builds(
        Piece,
        st.sampled_from([A, B, C]),
        st.floats(0, 30).map(lambda at_s: round(at_s, 2)),
        st.just(1),
        st.floats(0.1, 5).map(lambda run_s: round(run_s, 2)),
        st.one_of(st.none(), st.floats(0.01, 100)),
        st.integers(-1000, 1000),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.integers(1, 5))
def test_cores_are_never_idle_while_someone_waits_and_everybody_starts(
    pieces: list[Piece], cores: int
) -> None:
    machine = Machine(cores, shares(a=1.0, b=2.0, c=0.5))
    machine.run(pieces)
    assert machine.idle_while_waiting == 0
    assert len(machine.started_s) == len(pieces)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.lists(st.floats(0.1, 4), min_size=5, max_size=20), st.integers(1, 3))
def test_the_service_of_two_busy_tenants_differs_by_little(
    cores: int, lengths: list[float], weight: int
) -> None:
    """At any time by what runs at once, at most: nothing is preempted."""
    longest = max(lengths)
    pieces = [Piece(A, 0.0, run_s=length) for length in lengths * 4]
    pieces += [Piece(B, 0.0, run_s=longest, claims_s=0.1) for _ in range(len(lengths) * 4)]
    machine = Machine(cores, shares(b=float(weight)))
    total_s = sum(lengths) * 4 / cores
    for until_s in (total_s / 4, total_s / 2):
        machine.run(pieces if until_s == total_s / 4 else [], until_s=until_s)
        apart_s = abs(machine.used_s[A] - machine.used_s[B] / weight)
        assert apart_s <= 2 * (cores + 1) * (longest + 1.0)


def test_a_tenants_priority_orders_its_own_actions() -> None:
    pieces = [Piece(A, 0.0), Piece(A, 0.3), Piece(A, 0.4, priority=1000), Piece(B, 0.2)]
    machine = Machine(1, shares())
    machine.run(pieces)
    assert sorted(machine.started_s, key=machine.started_s.__getitem__) == ["a0", "b3", "a2", "a1"]


def test_a_limit_is_claimed_by_who_came_first_whatever_another_tenants_priority() -> None:
    """The claims of two lanes: cores with a quota, and the quota alone."""
    web = ResourceName("web")
    broker = ActionBroker(shares())
    started: list[str] = []

    def tell(event: on.Event) -> None:
        said = broker.handle(event)
        started.extend(c.spec.action for c in said if isinstance(c, do.StartAction))

    def permit(name: str, tenant: TenantId, **fields: object) -> ActionSpec:
        needs = (Need(web, Amounts.exactly(1)),)
        made = ActionSpec(ActionId(name), JobId("j"), "k", needs, tenant=tenant)
        return replace(made, **fields)  # type: ignore[arg-type]

    tell(on.LimitDeclared(0.0, Limit(web, concurrency=1)))
    tell(on.WorkerJoined(0.0, NODE, WorkerCapacity(((0, 1),), 1000)))
    tell(on.ActionSubmitted(1.0, permit("holds", C)))
    both = (*spec("x", B).needs, Need(web, Amounts.exactly(1)))
    tell(on.ActionSubmitted(2.0, replace(spec("first", B), needs=both)))
    tell(on.ActionSubmitted(3.0, permit("loud", A, priority=1000)))
    attempt = next(iter(broker.state.attempts))
    tell(on.ActionFinished(4.0, ActionId("holds"), attempt, OutcomeKind.DONE, 1.0))
    assert started == ["holds", "first"]


# ---- what one may hold of everything ----
def test_a_tenant_with_a_share_of_the_cores_leaves_the_rest_to_others() -> None:
    half = TenantLimits(core_share=0.5)
    broker = BrokerSettings(LeastEach(), tenants=TenantTable(named={"a": half}))
    long_ones = [Piece(A, 0.0, run_s=600.0) for _ in range(8)]
    machine = Machine(4, broker)
    machine.run([*long_ones, *(Piece(B, 1.0 + i, run_s=0.5) for i in range(10))], until_s=100.0)
    assert waits(machine, B) == [0.0] * 10
    assert len(waits(machine, A)) == 2


def test_an_action_is_expected_to_start_beside_another_tenants_that_wait_for_their_own_share() -> (
    None
):
    table = TenantTable(named={A: TenantLimits(core_share=0.5)})
    broker = ActionBroker(BrokerSettings(tenants=table))
    broker.handle(on.WorkerJoined(0.0, NODE, WorkerCapacity(cores=((0, 1),), memory_mib=1024)))

    def started(name: str, tenant: TenantId) -> bool:
        commands = broker.handle(on.ActionSubmitted(1.0, spec(name, tenant)))
        return any(isinstance(command, do.StartAction) for command in commands)

    assert broker.could_start(spec("a0", A))
    assert [started(f"a{number}", A) for number in range(5)] == [True, *[False] * 4]
    assert not broker.could_start(spec("a5", A))
    assert broker.could_start(spec("b0", B))
    assert started("b0", B)
    assert not broker.could_start(spec("b1", B))
    assert not started("b1", B)


def test_an_elastic_action_gets_no_more_cores_than_its_tenant_may_hold() -> None:
    broker = ActionBroker(
        BrokerSettings(tenants=TenantTable(named={"a": TenantLimits(core_share=0.5)}))
    )
    broker.handle(on.WorkerJoined(0.0, NODE, WorkerCapacity((tuple(range(8)),), 1000)))
    elastic = Elastic(CORES, Efficiency.amdahl(0.95, 8))
    needs = (Need(CORES, Amounts.from_range(1, 8)),)
    held = 0
    for name in "xy":
        asked = replace(spec(name, A), needs=needs, elastic=elastic, single_unit_s=10.0)
        said = broker.handle(on.ActionSubmitted(0.0, asked))
        held += sum(len(c.grant.cores) for c in said if isinstance(c, do.StartAction))
        check_broker(broker)
    assert held == 4
    wide = replace(spec("z", A), needs=(Need(CORES, Amounts.exactly(5)),))
    (end, *_) = broker.handle(on.ActionSubmitted(0.0, wide))
    assert isinstance(end, do.EndAction) and "its tenant may hold 4" in end.outcome.reason


def test_memory_is_shared_and_who_waits_for_it_keeps_only_its_own_from_going_on() -> None:
    """A tenant at its share of memory waits by itself, with its environments and with its
    actions."""
    broker = ActionBroker(BrokerSettings(tenants=TenantTable(TenantLimits(memory_share=0.5))))
    said: list[do.Command] = []

    def tell(event: on.Event) -> None:
        said.extend(broker.handle(event))
        check_broker(broker)

    def environment(name: str, tenant: TenantId, mib: int) -> on.EnvironmentRequested:
        where = EnvironmentSpec(EnvironmentId(name), JobId("j"), mib, 1000 * (tenant == A), tenant)
        return on.EnvironmentRequested(0.0, where)

    def started() -> set[str]:
        return {c.spec.action for c in said if isinstance(c, do.StartAction)}

    tell(on.WorkerJoined(0.0, NODE, WorkerCapacity(((0, 1, 2, 3),), 1000)))
    for i in range(8):
        tell(environment(f"a{i}", A, 100))
    tell(environment("b", B, 100))
    opened = [c.spec.environment for c in said if isinstance(c, do.OpenEnvironment)]
    assert opened == ["a0", "a1", "a2", "a3", "a4", "b"]
    needs = (*spec("x", A).needs, Need(MEMORY_MIB, Amounts.exactly(200)))
    tell(on.ActionSubmitted(1.0, replace(spec("of-a", A), needs=needs)))
    tell(on.ActionSubmitted(2.0, replace(spec("of-b", B), needs=needs)))
    assert started() == {"of-b"}
    for i in range(4):
        tell(on.EnvironmentClosed(3.0, EnvironmentId(f"a{i}")))
    opened = [c.spec.environment for c in said if isinstance(c, do.OpenEnvironment)]
    assert opened[6:] == ["a5", "a6", "a7"]


def test_a_flood_of_environments_is_opened_as_many_at_a_time_as_its_tenant_has_cores() -> None:
    """Else the worker, which makes them one after the other, would have no time for others."""
    broker = ActionBroker(BrokerSettings(tenants=TenantTable(TenantLimits(core_share=0.5))))
    opening: list[str] = []

    def tell(event: on.Event) -> None:
        said = broker.handle(event)
        opening.extend(c.spec.environment for c in said if isinstance(c, do.OpenEnvironment))
        check_broker(broker)

    def ask(name: str, tenant: TenantId) -> None:
        where = EnvironmentSpec(EnvironmentId(name), JobId("j"), 1, tenant=tenant)
        tell(on.EnvironmentRequested(0.0, where))

    tell(on.WorkerJoined(0.0, NODE, WorkerCapacity(((0, 1, 2, 3),), 1000)))
    for i in range(6):
        ask(f"a{i}", A)
    ask("b", B)
    assert opening == ["a0", "a1", "b"]
    tell(on.EnvironmentOpened(1.0, EnvironmentId("a0")))
    tell(on.EnvironmentClosed(1.0, EnvironmentId("a1")))
    assert opening == ["a0", "a1", "b", "a2", "a3"]


def test_waiting_actions_and_environments_are_counted_by_tenant() -> None:
    table = TenantTable(TenantLimits(waiting_actions=3, environments=2))
    broker = ActionBroker(BrokerSettings(tenants=table))
    reasons: list[str] = []
    for i in range(5):
        for command in broker.handle(on.ActionSubmitted(0.0, spec(f"x{i}", A))):
            assert isinstance(command, do.EndAction)
            reasons.append(command.outcome.reason)
    assert reasons == ["tenant a has 3 actions waiting, as many as it may; try again later"] * 2
    assert not broker.handle(on.ActionSubmitted(0.0, spec("y", B)))
    ended = []
    for i in range(3):
        where = EnvironmentSpec(EnvironmentId(f"e{i}"), JobId(f"j{i}"), 1, tenant=A)
        ended += list(broker.handle(on.EnvironmentRequested(0.0, where)))
    (end,) = (one for one in ended if isinstance(one, do.EndEnvironment))
    assert end.environment == "e2" and "has 2 environments" in end.reason
    check_broker(broker)


def test_what_is_above_a_ceiling_is_refused_by_the_broker_too() -> None:
    limits = TenantLimits(cores=2, limit_s=10.0, priority=5, memory_mib=100)
    broker = ActionBroker(BrokerSettings(tenants=TenantTable(named={"a": limits})))
    memory = (*spec("x", A).needs, Need(MEMORY_MIB, Amounts.exactly(101)))
    for name, asked in {
        "cores": spec("1", A, 3),
        "limit_s": spec("2", A, limit_s=11.0),
        "priority": spec("3", A, priority=6),
        "memory_mib": replace(spec("4", A), needs=memory),
    }.items():
        (end,) = broker.handle(on.ActionSubmitted(0.0, asked))
        assert isinstance(end, do.EndAction) and end.outcome.kind is OutcomeKind.REFUSED
        assert f"the operator's limit for tenant a ([limits] {name})" in end.outcome.reason


# ---- one tenant, as ever ----
@pytest.mark.parametrize(
    ("name", "broker"),
    [
        ("elastic", BrokerSettings(ElasticScheduling(), max_waiting=400, return_s=20.0)),
        ("short_first", BrokerSettings(order=ShortFirst(), return_s=20.0)),
        ("priced", BrokerSettings(return_s=20.0)),
    ],
)
def test_one_tenant_gets_what_it_got_before_there_was_fair_queueing(
    name: str, broker: BrokerSettings
) -> None:
    """Storms that a broker without it recorded, event by event."""
    record = Path(__file__).parent / "records" / f"{name}.jsonl.gz"
    lines = gzip.decompress(record.read_bytes()).splitlines()
    agreed, divergence = replay(ActionBroker(broker), lines, on.EVENT_TYPES)
    assert divergence is None
    assert agreed == len(lines) > 100


@pytest.mark.parametrize("seed", [1, 2])
def test_storms_of_several_tenants_keep_every_invariant_and_everything_ends(seed: int) -> None:
    """With shares of cores and memory, ceilings and weights; the broker is killed and comes back
    meanwhile."""
    limits = TenantLimits(core_share=0.9, memory_share=0.5, waiting_actions=100, environments=40)
    table = TenantTable(limits, {"t1": replace(limits, weight=3.0, core_share=0.5)})
    report = Storm(seed, BrokerSettings(tenants=table, return_s=20.0), tenants=3).run(1.5)
    assert report.outcomes[OutcomeKind.DONE] > 20


@pytest.mark.parametrize(
    ("queued", "least_s", "most_s"), [(0, 0, 0), (8, 0, 0), (20, 0.25, 0.75), (80, 0.5, 1.5)]
)
def test_the_longer_a_tenants_queue_the_longer_it_pauses_between_requests(
    queued: int, least_s: float, most_s: float
) -> None:
    machine = Machine(1, BrokerSettings())
    machine.run([Piece(B, 0.0, run_s=9.0)] * 2 + [Piece(A, 0.0)] * queued, until_s=0.0)
    books = machine.broker.state
    pauses_s = [books.tenant(A).pause_s() for _ in range(16)]
    assert least_s <= min(pauses_s) <= max(pauses_s) <= most_s
    assert books.tenant(B).pause_s() == 0
    gaps_s = np.diff(sorted(pauses_s))
    assert np.all(gaps_s >= (most_s - least_s) / 32)  # they do not come back at once


def test_a_tenant_whose_environments_wait_for_room_pauses_too() -> None:
    broker = ActionBroker(BrokerSettings())
    for number in range(80):
        spec = EnvironmentSpec(EnvironmentId(f"e{number}"), JobId("j"), 64, tenant=A)
        broker.handle(on.EnvironmentRequested(0.0, spec))
    owner = broker.state.tenant(A)
    assert owner.waiting_environments == 80 and owner.pause_s() >= 0.5
    for number in range(72):
        broker.handle(on.EnvironmentClosed(0.0, EnvironmentId(f"e{number}")))
    check_broker(broker)
    assert owner.waiting_environments == 8 and owner.pause_s() == 0
