"""Real ranks of a deployment: processes that join over loopback and run one function each."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.preloaded_programs import PreloadedPrograms
from slackwater.nets import ranks
from slackwater.nets.ranks import RankPlan
from slackwater.weights.plan.layout import Layout

DEADLINE_S = 400.0  # for a machine that many share


class RankProcesses:
    """The processes of one deployment, by rank; all are gone when the block ends."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    def wait(self, deadline_s: float = DEADLINE_S) -> list[int]:
        """Every rank's exit status."""
        until_s = time.monotonic() + deadline_s
        return [p.wait(max(0.1, until_s - time.monotonic())) for p in self.processes]

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self.processes[rank].send_signal(number)


def rank_environment(plan: RankPlan) -> dict[str, str]:
    """The variables that `RankPlan.from_environment` reads."""
    return {
        ranks.RANK_VARIABLE: str(plan.rank),
        ranks.WORLD_SIZE_VARIABLE: str(plan.layout.ranks),
        ranks.RENDEZVOUS_VARIABLE: plan.rendezvous,
        ranks.LAYOUT_VARIABLE: str(plan.layout),
        ranks.DEADLINE_VARIABLE: f"{plan.deadline_s:.0f}",
        ranks.BACKEND_VARIABLE: plan.backend,
    }


@contextlib.contextmanager
def rank_processes(
    layout: str,
    function: str,
    arguments: Mapping[str, Any],
    folder: Path,
    *,
    deadline_s: float = 200.0,
) -> Iterator[RankProcesses]:
    """Start `module:function(ranks_plan, **arguments)` on every rank of a layout."""
    parsed = Layout.parse(layout)
    rendezvous = folder / f"rendezvous-{time.monotonic_ns()}"
    programs = PreloadedPrograms.launch(["harness.rank_preload"])
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(parsed.ranks):
            plan = RankPlan(rank, parsed, f"file://{rendezvous}", deadline_s)
            with (folder / f"rank{rank}.log").open("ab") as log:
                started = programs.start(
                    "harness.rank_processes",
                    [function, json.dumps(dict(arguments))],
                    log,
                    environment=os.environ | rank_environment(plan) | {"OMP_NUM_THREADS": "1"},
                )
            processes.append(started)
        yield RankProcesses(processes)
    finally:
        programs.close()
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    import torch

    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(":")
    plan = RankPlan.from_environment(os.environ)
    getattr(importlib.import_module(module), name)(plan, **json.loads(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
