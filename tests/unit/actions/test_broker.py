"""The broker from outside: events in, commands out."""

from collections.abc import Sequence
from typing import TypeVar

import pytest

from harness.broker_checks import check_broker
from slackwater.control.actions import commands as do
from slackwater.control.actions import events as on
from slackwater.control.actions.broker import ActionBroker
from slackwater.control.actions.broker_state import BrokerSettings
from slackwater.control.timer import SetTimer, TimerFired
from slackwater.model.action import (
    ActionSpec,
    EnvironmentSpec,
    GpuService,
    Limit,
    Outcome,
    OutcomeKind,
    ServiceShape,
    WorkerCapacity,
)
from slackwater.model.amounts import CORES, GPUS, MEMORY_MIB, Amounts, Efficiency, Elastic, Need
from slackwater.model.errors import UnavailableError
from slackwater.model.ids import (
    NOBODY,
    ActionId,
    EnvironmentId,
    JobId,
    NodeId,
    ResourceName,
    ServiceName,
)

JOB = JobId("job")
NODE = NodeId("n0")
WEB = ResourceName("web")
T = TypeVar("T")


class Desk:
    """Feeds a broker and keeps what it said."""

    def __init__(self, settings: BrokerSettings | None = None) -> None:
        self.broker = ActionBroker(settings)
        self.said: list[do.Command] = []
        self.outcomes: dict[str, Outcome] = {}
        self.started: dict[str, do.StartAction] = {}

    def tell(self, event: on.Event) -> Sequence[do.Command]:
        commands = self.broker.handle(event)
        check_broker(self.broker)
        for command in commands:
            if isinstance(command, do.EndAction):
                assert command.action not in self.outcomes
                self.outcomes[command.action] = command.outcome
            if isinstance(command, do.StartAction):
                self.started[command.spec.action] = command
        self.said += commands
        return commands

    def worker(self, cores: int, *, memory: int = 1000, gpus: int = 0, node: NodeId = NODE) -> None:
        half = cores // 2
        numa = (tuple(range(half)), tuple(range(half, cores)))
        self.tell(on.WorkerJoined(0.0, node, WorkerCapacity(numa, memory, gpus, 80_000)))

    def finish(self, name: str, now_s: float, ran_s: float = 1.0) -> None:
        start = self.started[name]
        done = OutcomeKind.DONE
        self.tell(on.ActionFinished(now_s, ActionId(name), start.attempt, done, ran_s))

    def said_of(self, kind: type[T]) -> list[T]:
        return [command for command in self.said if isinstance(command, kind)]


def cores(name: str, least: int = 1, most: int | None = None, **fields: object) -> ActionSpec:
    amounts = Amounts.from_range(least, most or least)
    elastic = Elastic(CORES, Efficiency.amdahl(0.95, amounts.most)) if most else None
    needs = (Need(CORES, amounts),)
    return ActionSpec(ActionId(name), JOB, "test", needs, elastic=elastic, **fields)  # type: ignore[arg-type]


def web(name: str, units: int = 1, **fields: object) -> ActionSpec:
    return ActionSpec(ActionId(name), JOB, "search", (Need(WEB, Amounts.exactly(units)),), **fields)  # type: ignore[arg-type]


def environment(name: str = "e", memory: int = 100) -> EnvironmentSpec:
    return EnvironmentSpec(EnvironmentId(name), JOB, memory)


def test_an_action_runs_on_exclusive_cores_of_one_numa_node() -> None:
    desk = Desk()
    desk.worker(8)
    for i in range(3):
        desk.tell(on.ActionSubmitted(1.0, cores(f"a{i}", 3)))
    assert set(desk.started["a0"].grant.cores) == {0, 1, 2}
    assert set(desk.started["a1"].grant.cores) == {4, 5, 6}
    assert "a2" not in desk.started
    desk.finish("a0", 2.0)
    assert set(desk.started["a2"].grant.cores) == {0, 1, 2}
    assert desk.outcomes["a0"].kind is OutcomeKind.DONE


def test_an_elastic_action_gets_what_is_free_and_the_queue_gets_it_back() -> None:
    desk = Desk()
    desk.worker(8)
    desk.tell(on.ActionSubmitted(1.0, cores("a", 1, 8, single_unit_s=10.0)))
    assert len(desk.started["a"].grant.cores) == 8
    for name in "bc":
        desk.tell(on.ActionSubmitted(1.5, cores(name, 1, 8, single_unit_s=1.0)))
    desk.finish("a", 2.0)
    granted = [len(desk.started[name].grant.cores) for name in "bc" if name in desk.started]
    assert sum(granted) == 8


def test_durations_are_learned_and_then_make_an_action_elastic() -> None:
    desk = Desk()
    desk.worker(8)
    for i in range(3):
        desk.tell(on.ActionSubmitted(float(i), cores(f"a{i}", 1, 8)))
        assert len(desk.started[f"a{i}"].grant.cores) == 1
        desk.finish(f"a{i}", i + 0.5, ran_s=4.0)
    desk.tell(on.ActionSubmitted(9.0, cores("b", 1, 8)))
    assert len(desk.started["b"].grant.cores) == 8


def test_an_environment_keeps_its_memory_and_holds_no_cores_between_actions() -> None:
    desk = Desk()
    desk.worker(2, memory=150)
    desk.tell(on.EnvironmentRequested(0.0, environment("e1")))
    desk.tell(on.EnvironmentRequested(0.0, environment("e2")))
    assert [command.spec.environment for command in desk.said_of(do.OpenEnvironment)] == ["e1"]
    desk.tell(on.ActionSubmitted(0.0, cores("a", environment=EnvironmentId("e1"))))
    assert "a" not in desk.started
    desk.tell(on.EnvironmentOpened(1.0, EnvironmentId("e1")))
    assert desk.started["a"].grant.node == NODE
    desk.finish("a", 2.0)
    assert desk.broker.state.nodes[NODE].free == 2
    desk.tell(on.EnvironmentClosed(3.0, EnvironmentId("e1")))
    assert isinstance(desk.said[-2], do.CloseEnvironment)
    assert isinstance(desk.said[-1], do.OpenEnvironment)


def test_actions_of_one_environment_run_one_at_a_time_in_order() -> None:
    desk = Desk()
    desk.worker(4)
    desk.tell(on.EnvironmentRequested(0.0, environment()))
    desk.tell(on.EnvironmentOpened(0.0, EnvironmentId("e")))
    for name in "abc":
        desk.tell(on.ActionSubmitted(1.0, cores(name, environment=EnvironmentId("e"))))
    assert list(desk.started) == ["a"]
    desk.tell(on.ActionCancelled(1.5, ActionId("b")))
    desk.finish("a", 2.0)
    assert list(desk.started) == ["a", "c"]
    assert desk.outcomes["b"].kind is OutcomeKind.CANCELLED


def test_environments_go_where_most_memory_is_free() -> None:
    desk = Desk()
    desk.worker(2, memory=1000)
    desk.worker(2, memory=2000, node=NodeId("n1"))
    for i in range(3):
        desk.tell(on.EnvironmentRequested(0.0, environment(f"e{i}", 500)))
    assert [c.node for c in desk.said_of(do.OpenEnvironment)] == ["n0", "n1", "n1"]


def test_a_lost_worker_loses_environments_and_reruns_what_may_be_rerun() -> None:
    desk = Desk()
    desk.worker(4)
    desk.tell(on.EnvironmentRequested(0.0, environment()))
    desk.tell(on.EnvironmentOpened(0.0, EnvironmentId("e")))
    desk.tell(on.ActionSubmitted(1.0, cores("bound", environment=EnvironmentId("e"))))
    desk.tell(on.ActionSubmitted(1.0, cores("once")))
    desk.tell(on.ActionSubmitted(1.0, cores("again", retries=1)))
    desk.tell(on.WorkerLost(2.0, NODE, "power"))
    assert desk.outcomes["bound"].kind is OutcomeKind.LOST
    assert desk.outcomes["once"].kind is OutcomeKind.LOST
    assert [command.environment for command in desk.said_of(do.EndEnvironment)] == ["e"]
    assert "again" not in desk.outcomes
    desk.worker(4, node=NodeId("n1"))
    assert desk.started["again"].grant.node == "n1"
    desk.finish("again", 4.0)
    assert desk.outcomes["again"].kind is OutcomeKind.DONE


def test_a_cancelled_action_keeps_its_cores_until_its_worker_reports() -> None:
    desk = Desk()
    desk.worker(2)
    desk.tell(on.ActionSubmitted(0.0, cores("a", 2)))
    desk.tell(on.ActionSubmitted(0.0, cores("b", 2)))
    desk.tell(on.ActionCancelled(1.0, ActionId("a")))
    assert desk.said_of(do.StopAction)[0].action == "a"
    assert "b" not in desk.started
    start = desk.started["a"]
    failed = OutcomeKind.FAILED
    desk.tell(on.ActionFinished(1.2, ActionId("a"), start.attempt, failed, 1.0, "killed"))
    assert desk.outcomes["a"].kind is OutcomeKind.CANCELLED
    assert "b" in desk.started


def test_an_action_that_cannot_be_killed_is_given_up_but_its_cores_are_not() -> None:
    desk = Desk(BrokerSettings(stop_grace_s=5.0))
    desk.worker(2)
    desk.tell(on.ActionSubmitted(0.0, cores("a", 2, deadline_s=1.0)))
    desk.tell(on.ActionSubmitted(0.0, cores("b", 1)))
    desk.tell(TimerFired(1.0, "actions"))
    assert "a" not in desk.outcomes
    desk.tell(TimerFired(6.0, "actions"))
    assert desk.outcomes["a"].kind is OutcomeKind.TIMED_OUT
    assert "b" not in desk.started
    desk.finish("a", 60.0)
    assert "b" in desk.started


def test_a_waiting_action_past_its_deadline_times_out() -> None:
    desk = Desk()
    desk.tell(on.ActionSubmitted(0.0, cores("a", deadline_s=2.0)))
    assert desk.said[-1] == SetTimer("actions", 2.0)
    desk.tell(TimerFired(2.0, "actions"))
    assert desk.outcomes["a"].kind is OutcomeKind.TIMED_OUT


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (cores("a", 9), "9 cores"),
        (cores("a", environment=EnvironmentId("nowhere")), "nowhere is not open"),
        (web("a"), "web is not declared"),
        (
            ActionSpec(
                ActionId("a"),
                JOB,
                "test",
                (Need(CORES, Amounts.exactly(1)), Need(MEMORY_MIB, Amounts.exactly(5000))),
            ),
            "5000 MiB",
        ),
        (
            ActionSpec(
                ActionId("a"),
                JOB,
                "judge",
                (Need(GPUS, Amounts.exactly(1)),),
                service=ServiceName("judge"),
            ),
            "judge is not declared",
        ),
    ],
)
def test_what_can_never_run_is_refused_with_the_reason(spec: ActionSpec, says: str) -> None:
    desk = Desk()
    desk.worker(8)
    desk.tell(on.ActionSubmitted(0.0, spec))
    assert desk.outcomes["a"].kind is OutcomeKind.REFUSED
    assert says in desk.outcomes["a"].reason


def test_a_full_queue_says_so() -> None:
    desk = Desk(BrokerSettings(max_waiting=2))
    desk.worker(2)
    for i in range(4):
        desk.tell(on.ActionSubmitted(0.0, cores(f"a{i}", 2)))
    assert desk.outcomes["a3"].kind is OutcomeKind.REFUSED
    assert "queue is full" in desk.outcomes["a3"].reason
    with pytest.raises(UnavailableError, match="queue is full"):
        desk.broker.check_room(NOBODY)


def test_a_quota_is_waited_for_and_never_exceeded() -> None:
    desk = Desk()
    desk.tell(on.LimitDeclared(0.0, Limit(WEB, quota=2, window_s=10.0)))
    for i in range(3):
        desk.tell(on.ActionSubmitted(float(i), web(f"a{i}")))
    assert list(desk.started) == ["a0", "a1"]
    timer = desk.said[-1]
    assert isinstance(timer, SetTimer) and timer.at_s == pytest.approx(10.0)
    desk.finish("a0", 3.0)
    assert "a2" not in desk.started
    desk.tell(TimerFired(timer.at_s, "actions"))
    assert "a2" in desk.started


def test_one_that_waits_for_a_limit_steps_aside_but_keeps_its_claim() -> None:
    desk = Desk()
    desk.worker(4)
    desk.tell(on.LimitDeclared(0.0, Limit(WEB, concurrency=2)))
    desk.tell(on.ActionSubmitted(0.0, web("holder")))
    both = (Need(CORES, Amounts.exactly(1)), Need(WEB, Amounts.exactly(2)))
    desk.tell(on.ActionSubmitted(1.0, ActionSpec(ActionId("both"), JOB, "test", both)))
    desk.tell(on.ActionSubmitted(2.0, cores("plain")))
    desk.tell(on.ActionSubmitted(3.0, web("late")))
    assert "plain" in desk.started
    assert "late" not in desk.started, "it would take what an earlier one is waiting for"
    desk.finish("holder", 4.0)
    assert "both" in desk.started and "late" not in desk.started
    desk.finish("both", 5.0)
    assert "late" in desk.started


def test_a_large_action_is_not_starved_by_a_stream_of_small_ones() -> None:
    desk = Desk()
    desk.worker(8)
    for i in range(60):
        now_s = float(i)
        desk.tell(on.ActionSubmitted(now_s, cores(f"s{i}")))
        if i == 20:
            desk.tell(on.ActionSubmitted(now_s, cores("large", 8)))
        running = [name for name in desk.started if name not in desk.outcomes]
        if len(running) > 4 or i > 20:  # the node is never idle before the large one comes
            desk.finish(running[0], now_s)
    assert "large" in desk.started
    assert desk.outcomes["large"].queued_s <= 8.0


def test_priority_is_worth_a_head_start_and_no_more() -> None:
    desk = Desk()
    desk.worker(2)
    desk.tell(on.ActionSubmitted(0.0, cores("first", 2)))
    desk.tell(on.ActionSubmitted(100.0, cores("plain", 2)))
    desk.tell(on.ActionSubmitted(120.0, cores("urgent", 2, priority=1)))
    desk.tell(on.ActionSubmitted(170.0, cores("late", 2, priority=1)))
    for name, now_s in (("first", 200.0), ("urgent", 201.0), ("plain", 202.0)):
        desk.finish(name, now_s)
    assert list(desk.started) == ["first", "urgent", "plain", "late"]


def gpu(name: str, service: str, *sizes: int, **fields: object) -> ActionSpec:
    needs = (Need(GPUS, Amounts.from_choices(*sizes)),)
    elastic = Elastic(GPUS, Efficiency.amdahl(0.95, 8))
    label = ServiceName(service)
    return ActionSpec(ActionId(name), JOB, service, needs, service=label, elastic=elastic, **fields)  # type: ignore[arg-type]


def service(name: str, mib: int = 60_000) -> GpuService:
    return GpuService(
        ServiceName(name), tuple(ServiceShape(n, mib // n, 2.0) for n in (1, 2, 4, 8))
    )


def test_a_service_stays_on_its_gpus_until_the_memory_is_needed() -> None:
    desk = Desk()
    desk.worker(2, gpus=2)
    for name in ("x", "y", "z"):
        desk.tell(on.ServiceDeclared(0.0, service(name)))
    for i, name in enumerate(["x", "y", "x", "z", "x"]):
        desk.tell(on.ActionSubmitted(float(i), gpu(f"a{i}", name, 1, single_unit_s=1.0)))
        desk.finish(f"a{i}", i + 0.5)
    assert [c.service for c in desk.said_of(do.RestoreService)] == ["x", "y", "z"]
    assert [c.service for c in desk.said_of(do.EvictService)] == ["y"], "the least recently used"


def test_gpu_chunks_are_aligned_and_large_ones_are_kept_whole() -> None:
    desk = Desk()
    desk.worker(2, gpus=8)
    desk.tell(on.ServiceDeclared(0.0, service("x")))
    desk.tell(on.ActionSubmitted(0.0, gpu("one", "x", 1)))
    desk.tell(on.ActionSubmitted(0.0, gpu("two", "x", 2)))
    desk.tell(on.ActionSubmitted(0.0, gpu("four", "x", 4)))
    assert [desk.started[n].grant.gpus for n in ("one", "two", "four")] == [
        (0,),
        (2, 3),
        (4, 5, 6, 7),
    ]


def test_after_a_restart_every_action_of_the_log_still_ends_once() -> None:
    desk = Desk()
    e = EnvironmentId("e")
    desk.tell(on.EnvironmentAdopted(100.0, environment("e")))
    desk.tell(on.EnvironmentAdopted(100.0, environment("gone")))
    desk.tell(on.ActionAdopted(100.0, cores("was running", environment=e), 90.0, started=True))
    desk.tell(on.ActionAdopted(100.0, cores("waited", environment=e), 91.0, started=False))
    gone = cores("no more", environment=EnvironmentId("gone"))
    desk.tell(on.ActionAdopted(100.0, gone, 92.0, started=False))
    assert desk.outcomes["was running"].kind is OutcomeKind.LOST
    capacity = WorkerCapacity(((0, 1),), 1000)
    desk.tell(on.WorkerJoined(101.0, NODE, capacity, (environment("e"), environment("stranger"))))
    assert [c.environment for c in desk.said_of(do.CloseEnvironment)] == ["stranger"]
    desk.finish("waited", 102.0)
    assert desk.outcomes["waited"].queued_s == pytest.approx(10.0)
    desk.tell(TimerFired(160.0, "actions"))
    assert desk.outcomes["no more"].kind is OutcomeKind.LOST
