"""How many processors each part of the demo keeps busy while it runs, and how fast those are."""

import contextlib
import json
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import psutil

from benchmarks.processor_use import HOST, ProcessorUse

_LOOK_S, _PROBES = 0.5, 5  # between two looks, and how often they measure the speed
_KINDS = ("engine", "serving", "trainer", "action")  # what the simulation knows to run
_BESIDE = "beside"
_PROBE = [{"row": row, "text": str(row) * 4} for row in range(1000)]
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


def _speed() -> float:
    """How often a processor could do a fixed piece of work in a second of its time. This depends on
    what else a virtual machine's host runs: one of two hardware threads is half as fast while the
    other one is busy.
    """
    began_s = time.thread_time()
    json.loads(json.dumps(_PROBE))
    return 1.0 / (time.thread_time() - began_s)


@dataclass(frozen=True, slots=True)
class Look:
    """Processor time so far by kind, and the processors' mean speed since the last look."""

    at_s: float  # of the monotonic clock
    used: Mapping[str, float]
    speed: float


@dataclass(frozen=True, slots=True)
class ProcessorLooks:
    """What was seen while a demo ran."""

    looks: list[Look] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "ProcessorLooks":
        return cls([Look(**look) for look in json.loads(path.read_text())])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([asdict(look) for look in self.looks]))

    def speed(self, windows: Iterable[tuple[float, float]]) -> float:
        """The mean over these windows of the mean speed in each."""
        return fmean(
            fmean(look.speed for look in self.looks if from_s <= look.at_s <= to_s)
            for from_s, to_s in windows
        )

    def used(self, from_s: float, to_s: float) -> dict[str, float]:
        """By kind between two moments; evenly between two looks."""
        found: dict[str, float] = defaultdict(float)
        for before, after in pairwise(self.looks):
            inside_s = min(after.at_s, to_s) - max(before.at_s, from_s)
            if inside_s > 0:
                share = inside_s / (after.at_s - before.at_s)
                for kind, used_s in after.used.items():
                    found[kind] += share * (used_s - before.used.get(kind, 0.0))
        return found


class ProcessorLog:
    """Processor time of a process and its descendants, read twice a second until it ends."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.looks = ProcessorLooks()
        self._process = process
        self._use = ProcessorUse(process.pid, _kind_of, with_ended=True)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def look(self, *speeds: float) -> None:
        used = self._use.seconds()
        self.looks.looks.append(Look(time.monotonic(), used, fmean(speeds or (_speed(),))))

    def _follow(self) -> None:
        while self._process.poll() is None:
            speeds = []
            for _ in range(_PROBES):
                speeds.append(_speed())
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_LOOK_S / _PROBES)
            self.look(*speeds)


_Total: TypeAlias = tuple[float, dict[str, float]]  # a moment, and seconds by kind until then


class BusyTime:
    """How long engines, actions and the trainer ran: at the start of each iteration of each job."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._running: dict[str, Counter[str]] = defaultdict(Counter)  # by kind and process
        self._total_s = dict.fromkeys(_KINDS, 0.0)
        self._starts: dict[str, list[_Total]] = defaultdict(list)

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

    def _warm(self) -> Iterator[tuple[_Total, _Total]]:
        for starts in self._starts.values():
            yield starts[min(1, len(starts) - 1)], starts[-1]

    def windows(self) -> list[tuple[float, float]]:
        """From each job's second iteration to its last one: parts compile in the first."""
        return [(first[0], last[0]) for first, last in self._warm()]

    def processors(self, looks: ProcessorLooks) -> dict[str, float]:
        """Processors that one of each kind keeps busy in these windows. What is used beside them is
        divided by what they use.
        """
        ran_s: Counter[str] = Counter()
        used_s: Counter[str] = Counter()
        for (from_s, before), (to_s, after) in self._warm():
            ran_s.update({kind: after[kind] - before[kind] for kind in after})
            used_s.update(looks.used(from_s, to_s))
        del used_s[HOST]  # a Counter: it need not be there
        own_s = sum(used_s[kind] for kind in _KINDS)
        with_beside = sum(used_s.values()) / own_s if own_s else 1.0
        return {
            kind: used_s[kind] / ran_s[kind] * with_beside if ran_s[kind] else 1.0
            for kind in _KINDS
        }
