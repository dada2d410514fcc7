"""How many processors each part of the demo keeps busy while it runs, measured."""

import contextlib
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise

import psutil

from benchmarks.processor_use import HOST, ProcessorUse

ProcessorTime = Callable[[float, float], Mapping[str, float]]  # by kind, between two moments

_LOOK_S = 0.5
_KINDS = ("engine", "serving", "trainer", "action")  # what the simulation knows to run
_BESIDE = "beside"
# A part of the command line; what runs in a sandbox has none of them.
_LINES = (
    ("worker.engine_worker", "engine"),
    ("worker.coserving_worker", "serving"),
    ("worker.trainer_worker", "trainer"),
    ("worker.sandbox_worker", "action"),
    ("slackwater", _BESIDE),
)


def _kind_of(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((kind for part, kind in _LINES if part in line), "action")


class ProcessorLog:
    """Processor time of a process and its descendants, read twice a second until it ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._use = ProcessorUse(process.pid, _kind_of, with_ended=True)
        self._looks: list[tuple[float, dict[str, float]]] = []
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def look(self) -> None:
        self._looks.append((time.monotonic(), self._use.seconds()))

    def _follow(self) -> None:
        while self._process.poll() is None:
            self.look()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)

    def used(self, from_s: float, to_s: float) -> dict[str, float]:
        """By kind between two moments of the monotonic clock; evenly between two looks."""
        found: dict[str, float] = defaultdict(float)
        for (began_s, before), (ended_s, after) in pairwise(self._looks):
            inside_s = min(ended_s, to_s) - max(began_s, from_s)
            if inside_s > 0:
                share = inside_s / (ended_s - began_s)
                for kind, used_s in after.items():
                    found[kind] += share * (used_s - before.get(kind, 0.0))
        return found


class BusyTime:
    """How long engines, actions and the trainer ran: at the start of each iteration of each job."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._running: dict[str, Counter[str]] = defaultdict(Counter)  # by kind and process
        self._total_s = dict.fromkeys(_KINDS, 0.0)
        self._starts: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)

    def advance(self, now_s: float) -> None:
        for kind, processes in self._running.items():
            busy = sum(count > 0 for count in processes.values())
            self._total_s[kind] += busy * (now_s - self._at_s)
        self._at_s = now_s

    def begin(self, kind: str, process: str) -> None:
        self._running[kind][process] += 1

    def end(self, kind: str, process: str) -> None:
        self._running[kind][process] -= 1

    def start_iteration(self, job: str) -> None:
        self._starts[job].append((self._at_s, self._total_s.copy()))

    def processors(self, used: ProcessorTime) -> dict[str, float]:
        """Processors that one of each kind keeps busy, from each job's second iteration on: parts
        compile in the first. What is used beside them is divided by what they use.
        """
        ran_s: Counter[str] = Counter()
        used_s: Counter[str] = Counter()
        for starts in self._starts.values():
            (from_s, before), (to_s, after) = starts[min(1, len(starts) - 1)], starts[-1]
            ran_s.update({kind: after[kind] - before[kind] for kind in after})
            used_s.update(used(from_s, to_s))
        del used_s[HOST]
        own_s = sum(used_s[kind] for kind in _KINDS)
        with_beside = sum(used_s.values()) / own_s if own_s else 1.0
        return {
            kind: used_s[kind] / ran_s[kind] * with_beside if ran_s[kind] else 1.0
            for kind in _KINDS
        }
