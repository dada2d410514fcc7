"""`slackwater top` draws whatever a service says, on any width, in a pipe too."""

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from slackwater.cli.top_frame import bar, draw

ACCOUNT = {
    **{"turns_waited_s": 3.0, "operations_waited_s": 1.0, "turns": 6, "operations": 2},
    **{"device_s": 12.5, "tokens": 4321},
}
GAUGES = {"rollout_live_turns": 7, "rollout_waiting_turns": 2, "waiting_operations": 3}


def job(name: str, stage: str = "running", **more: Any) -> dict[str, Any]:
    return {"job": f"me/{name}", "name": name, "stage": stage, **ACCOUNT, **more}


def shared(slowdown: float | None = 1.2) -> dict[str, Any]:
    node = {"host": "this", "tail": None, "permit": 4, "utilisation": 0.81}
    held = {"job": "me/digits", "phase": "rollout", "since_s": 1.25}
    idle = {"job": None, "phase": None, "since_s": None}
    known = {"job": "me/digits", "bound": 1.5, "slowdown": slowdown, "phase": "rollout"}
    return {
        "placement": "ours",
        "ordering": "plan",
        "pools": {
            "rollout": {"nodes": 1, "busy": 1, "utilisation": 0.81},
            "train": {"nodes": 1, "busy": 0, "utilisation": 0.4},
        },
        "nodes": [
            {"node": "rollout-0", "pool": "rollout", **node, **held},
            {"node": "train-0", "pool": "train", **node, **idle},
        ],
        "jobs": [{**known, "holds_s": 1.25, "waits_s": None, "switches": 3}],
        "permits": {"given": 12, "switches": 3, "tail_migrations": 0, "p50_ms": 0.1, "p99_ms": 0.4},
    }


def frame(jobs: list[dict[str, Any]], with_shared: dict[str, Any] | None) -> dict[str, Any]:
    instance = {"instance": "engine-0-1.1", "kind": "dedicated", "state": "ready", "running": 3}
    return {
        "url": "http://127.0.0.1:8123",
        "at_s": 0.0,
        "status": {"gauges": GAUGES},
        "jobs": jobs,
        "instances": [instance],
        "nodes": [{"node": "this", "pool": "all", "workers": ["a", "b"]}],
        "shared": with_shared,
    }


def text(content: dict[str, Any], width: int = 120, height: int = 1000, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(draw(content, width, height, **options))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_frame_says_who_holds_what_and_how_slow_each_job_is() -> None:
    drawn = text(frame([job("digits", iteration=4, iterations=20, reward=0.25)], shared()))
    for words in ("rollout-0", "digits", "1.20/1.50", "4/20", "0.250", "81%", "3 switches", "idle"):
        assert words in drawn


def test_without_a_co_scheduler_it_shows_what_there_is() -> None:
    drawn = text(frame([job("digits"), job("done", "finished")], None))
    assert "digits" in drawn and "turns 7 live, 2 waiting" in drawn and "engine-0-1.1" in drawn
    assert "done" not in drawn
    assert "done" in text(frame([job("done", "finished")], None), everything=True)


@settings(max_examples=30, deadline=None)
@given(
    width=st.integers(20, 200),
    height=st.integers(8, 60),
    jobs=st.integers(0, 40),
    slowdown=st.none() | st.floats(0, 10),
)
def test_no_line_is_wider_than_the_terminal(
    width: int, height: int, jobs: int, slowdown: float | None
) -> None:
    rows = [job(f"job-{n}-" + "x" * n, priority=1) for n in range(jobs)]
    drawn = text(frame([job("digits"), *rows], shared(slowdown)), width, height)
    assert max(len(line) for line in drawn.splitlines()) <= width


@pytest.mark.parametrize(
    ("share", "cells"), [(0.0, "····"), (0.5, "██··"), (1.0, "████"), (9.0, "████")]
)
def test_a_bar_is_as_long_as_its_share(share: float, cells: str) -> None:
    assert bar(share, 4) == cells
