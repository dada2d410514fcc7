"""What the demo prints, from runs that were written down: one clock, one definition."""

import io
from typing import Any

import pytest
from rich.console import Console

from slackwater.cli.demo_display import demo_table
from slackwater.cli.demo_run import TypicalIteration, WatchedJob, sharing_figures


def watched(name: str, ends_s: list[float], *, engine_s: float, trainer_s: float) -> WatchedJob:
    """A job whose iterations end at these times and use so much of both pools; mark 0 is its
    submission.
    """
    job = WatchedJob(name)
    for number, at_s in enumerate(ends_s):
        row = {
            "iteration": number,
            "engine_s": number * engine_s,
            "trainer_s": number * trainer_s,
            "stage": "running",
        }
        job.look(row, at_s)
        job.look({**row, "engine_s": 99.0}, at_s + 0.2)  # seen again before the next is done
    return job


STALLED = [0.0, 20.0, 22.0, 24.0, 31.0, 33.0, 35.0]  # the fourth iteration of the run waited 5 s


def test_a_stall_is_in_no_typical_iteration() -> None:
    job = watched("one", STALLED, engine_s=1.2, trainer_s=0.8)
    typical = TypicalIteration.from_job(job)
    assert typical.seconds == pytest.approx(2.0)
    assert typical.used == pytest.approx({"engine_s": 1.2, "trainer_s": 0.8})


def test_iterations_shorter_than_some_looks_are_as_long_as_on_average() -> None:
    ends_s = [0.0, *(20 + 0.2 * looks for looks in (0, 3, 6, 10, 13, 17, 42))]  # a stall at the end
    typical = TypicalIteration.from_job(watched("one", ends_s, engine_s=0.3, trainer_s=0.2))
    assert typical.seconds == pytest.approx(0.68)
    assert typical.used == pytest.approx({"engine_s": 0.3, "trainer_s": 0.2})


def test_a_job_of_which_one_iteration_was_seen_counts_from_its_start() -> None:
    job = watched("one", [10.0, 16.0], engine_s=1.0, trainer_s=1.0)
    assert TypicalIteration.from_job(job).seconds == pytest.approx(6.0)


def test_iterations_that_passed_between_two_looks_are_divided() -> None:
    job = WatchedJob("one")
    for number, at_s in ((0, 0.0), (1, 1.0), (4, 4.0)):
        job.look({"iteration": number, "engine_s": number, "trainer_s": 0.0, "stage": ""}, at_s)
    assert TypicalIteration.from_job(job).seconds == pytest.approx(1.0)


def shared_run() -> dict[str, Any]:
    """Two jobs of ten iterations: 2 s each alone, with a stall; together 3 s each."""
    names = ("down", "up")
    alone = {
        name: TypicalIteration.from_job(
            watched(f"{name}-alone", STALLED, engine_s=1.2, trainer_s=0.8)
        )
        for name in names
    }
    ends_s = [100.0, *(110.0 + 3 * i for i in range(10))]
    jobs = [
        watched("down", ends_s, engine_s=1.2, trainer_s=0.8),
        watched("up", [at + 1.5 for at in ends_s], engine_s=1.2, trainer_s=0.8),
    ]
    return sharing_figures(jobs, alone, dict.fromkeys(names, 10))


def test_all_times_are_by_the_watchers_clock_and_the_slowdown_is_their_ratio() -> None:
    found = shared_run()
    assert found["per_job"]["down"] == pytest.approx(
        {"alone_s": 2.0, "shared_s": 3.0, "slowdown": 1.5}
    )
    assert found["took_s"] == pytest.approx(27.0) and found["alone_s"] == pytest.approx(36.0)
    rollout, train = found["pools"]["rollout"], found["pools"]["train"]
    assert rollout["used_alone"] == pytest.approx(0.6)
    assert train["used_alone"] == pytest.approx(0.4)
    assert rollout["used_together"] > rollout["used_alone"]


def test_the_table_shows_the_same_figures() -> None:
    found = shared_run()
    rest = {"stage": "finished", "iterations": 10, "reward_first": 0.1, "reward_last": 0.7}
    rows = [
        {"job": name, "bound": 2.5, **rest, **figures}
        for name, figures in found.pop("per_job").items()
    ]
    parts = {"rollout": 0.5, "train": 0.25, "waits": 0.15, "hand_over": 0.1}
    rows[0]["time"] = {"alone": None, "shared": parts}
    rows[1]["time"] = {"alone": None, "shared": None}  # too few iterations
    permits = {"given": 42, "switches": 7, "p99_ms": 1.25}
    more = {"permits": permits, "instance": {"came": None}, "timeline": "timeline.json"}
    text = io.StringIO()
    Console(file=text, width=100).print(demo_table({"jobs": rows, **found, **more}))
    split = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    lines = {words[0]: words for words in reversed(split)}
    assert lines["down"][-4:] == ["2.00", "3.00", "1.50", "2.50"]
    assert lines["up"][-4:] == ["2.00", "3.00", "1.50", "2.50"]
    assert lines["down,"] == ["down,", "shared", "50%", "25%", "15%", "10%"]
    assert lines["rollout"][-1] == "60%"
    assert "(1.33x)" in text.getvalue()
    assert "42 permits, 7 switches, p99 1.2 ms a permit" in text.getvalue()
    meanings = " ".join(text.getvalue().split())
    assert all(f"{word}: " in meanings for word in ("slowdown", "bound", "waits", "switch"))
