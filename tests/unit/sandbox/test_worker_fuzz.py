"""Whatever a sandbox worker is told, it lives, works afterwards, and writes nowhere but in its own
folder.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worker_stage import LIMITS, WorkerStage, a_worker, open_environment, run_action

from slackwater.wire import sandbox

# Few of each, so that one request meets what another has made.
PARTS = st.sampled_from(["a", "b", "..", ".", "", "\0", "x" * 256, "é", "\udc80", "link", "a\nb"])
PATHS = st.lists(PARTS, min_size=1, max_size=5).map("/".join) | st.text(max_size=20)
NAMES = st.sampled_from(
    ["e", "f", "g", "e.1", "e:2", "../e", "/e", "", ".e", "n\0", "y" * 201, "\udc80"]
)
WRONG: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1, 1.5, "text", b"bytes", [], {}, [None]]
)
CONTENTS = st.binary(max_size=64) | WRONG
FILES = st.dictionaries(PATHS, CONTENTS, max_size=4) | WRONG
TEXTS = st.sampled_from(["x", "\0", "=", "", "\udc80", "a=b", "$HOME", "é"])
VARIABLES = st.dictionaries(TEXTS | PATHS, TEXTS, max_size=3) | WRONG
COMMANDS = (
    st.sampled_from(
        [
            ["/bin/true"],
            ["/bin/sh", "-c", "mkdir -p a/b; ln -sf ../../.. link; echo x > a/file"],
            ["/bin/sh", "-c", "mkfifo pipe; ln -s / a; truncate -s 1T hole; : > b"],
            ["/bin/sh", "-c", "chmod 000 . ; mkdir e; exit 3"],
            ["/nowhere"],
        ]
    )
    | st.lists(TEXTS, max_size=3)
    | WRONG
)
LIMITS_GIVEN = st.just(LIMITS) | st.builds(
    sandbox.ActionLimits,
    wall_s=st.sampled_from([-1.0, 0.2, float("nan"), 1e9]),
    output_bytes=st.sampled_from([0, 1, 1 << 70]),
    memory_bytes=st.sampled_from([0, 1, 1 << 62, 1 << 70]),
    processes=st.sampled_from([0, 8, 1 << 40]),
    disk_bytes=st.sampled_from([0, 4096, 1 << 30, 1 << 70]),
    network=st.booleans(),
)
OPENS = st.builds(open_environment, NAMES, snapshot=st.none() | NAMES | WRONG, files=FILES)
RUNS = st.fixed_dictionaries(
    {
        "command": COMMANDS,
        "environment": st.none() | NAMES | WRONG,
        "variables": VARIABLES,
        "limits": LIMITS_GIVEN | WRONG,
        "stdin": st.binary(max_size=16) | WRONG,
        "cores": st.just([min(os.sched_getaffinity(0))])
        | st.sampled_from([[], [-1], [10**9], None]),
        "stream": st.booleans(),
    }
)
CLOSES = st.builds(sandbox.CloseEnvironment, NAMES | WRONG)
KEEPS = st.builds(sandbox.KeepSnapshot, st.integers(0, 9), NAMES | WRONG, NAMES | WRONG)
REQUESTS = st.lists(OPENS | RUNS | CLOSES | KEEPS, min_size=1, max_size=6)


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerStage]:
    with a_worker() as made:
        yield made


def names_around(root: Path) -> set[str]:
    """What lies beside the worker's own folders, and in the folder of whoever runs the tests."""
    own = {"environments", "snapshots"}
    return {str(each) for each in root.iterdir() if each.name not in own} | {
        str(each) for each in Path.cwd().iterdir()
    }


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=REQUESTS)
def test_a_worker_survives_whatever_it_is_told(worker: WorkerStage, requests: list[Any]) -> None:
    before = names_around(worker.stage.root)
    attempts = set()
    for request in requests:
        if isinstance(request, dict):
            attempt = worker.next_attempt()
            attempts.add(attempt)
            request = run_action(attempt, **request)
        worker.tell(request)
    for attempt in attempts:
        worker.tell(sandbox.StopAction(attempt, "enough"))
        worker.outcome(attempt)
    worker.check_lives()
    assert names_around(worker.stage.root) == before
    for name in worker.stage.supervisor.environments():
        worker.tell(sandbox.CloseEnvironment(name))
    worker.wire.answers.clear()
