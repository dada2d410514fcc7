"""Unfinished turns wait for the engines of the last control plane, and for no longer than that."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from slackwater.model.ids import NodeId, WorkerId
from slackwater.runtime.launch.fleet import ReturningEngines
from slackwater.wire.agent import NodeFacts, RunningWorker, StartWorker

ENGINE = "slackwater.worker.engine_worker"


def node(name: str, *modules: str) -> NodeFacts:
    orders = [StartWorker(f"{name}.{module}", "log", module, [], "key") for module in modules]
    running = tuple(RunningWorker(order, number) for number, order in enumerate(orders, 1))
    return NodeFacts(name, running=running)


def waits_after(file: Path, *steps: Callable[[ReturningEngines], None]) -> list[bool]:
    """Whether turns still wait after each of the steps of a start."""

    async def start() -> list[bool]:
        returning = ReturningEngines(file, ENGINE)
        waiting = asyncio.create_task(returning.wait(300.0))
        found = []
        for step in steps:
            step(returning)
            for _ in range(5):  # the rounds of the loop in which the wait ends, if it does
                await asyncio.sleep(0)
            found.append(not waiting.done())
        waiting.cancel()
        return found

    return asyncio.run(start())


def test_a_node_that_joins_before_the_fleet_starts_does_not_hide_the_others(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a\nb")
    assert waits_after(
        file,
        lambda returning: returning.add_node(node("a", ENGINE)),
        lambda returning: returning.settle_engine(WorkerId(f"a.{ENGINE}")),
        lambda returning: returning.begin(None),
        lambda returning: returning.add_node(node("b", "slackwater.worker.trainer_worker")),
    ) == [True, True, True, False]


def test_turns_wait_for_no_node_that_is_known_to_be_gone(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a\nb")
    assert waits_after(
        file,
        lambda returning: returning.begin({NodeId("b")}),
        lambda returning: returning.add_node(node("b", ENGINE)),
        lambda returning: returning.settle_engine(WorkerId(f"b.{ENGINE}")),
    ) == [True, True, False]


def test_a_first_start_waits_for_nothing(tmp_path: Path) -> None:
    assert waits_after(tmp_path / "nodes", lambda returning: returning.begin(None)) == [False]
