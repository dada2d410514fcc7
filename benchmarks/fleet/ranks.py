"""bench ranks: two jobs share the ranks of one trainer, again and again, while ranks are killed or
frozen at random.

Each run plays the control plane and the agent of one deployment: it sends operations to rank 0,
ends all ranks when one ends, starts them again, and goes on from the last save by sending the
operations after it once more. The jobs' last states and every answer are compared, to the bit, with
an undisturbed run under the same layout.
"""

import hashlib
import importlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fleet.rank_engines import compare_engines
from benchmarks.fleet.rank_steps import compare_steps
from benchmarks.options import BenchOptions
from harness.direct_worker import offer_models
from harness.rank_training import ADAM, NET
from harness.rank_worker import encoded, run_piped_worker
from slackwater.model.session import LoraShape
from slackwater.nets.loading import load_net, save_net
from slackwater.nets.ranks import RankPlan
from slackwater.weights.plan.layout import Layout
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder

PARTS = ("faults", "steps", "engine")
_LAYOUTS = ("dp=2", "tp=2", "tp=2,dp=2")
_JOBS = {"full": LoraShape(0), "lora": LoraShape(4)}
_STEPS = 6
_SAVE_EVERY = 2
_DEADLINE_S = 10.0
_GRACE_S = 60.0  # beyond the deadline, for a busy machine to end a process
_RUN_LIMIT_S = 300.0
_ALL_RUNS_S = 3600.0  # no run begins later unless `--duration` says so
_PRELOADED = "harness.rank_preload"
_METHODS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True, slots=True)
class Fault:
    """When so many operations have been answered, and so much later."""

    after: int
    delay_s: float
    rank: int
    how: str


@dataclass(slots=True)
class Found:
    """What all runs showed. `left`: ranks that outlived a lost one beyond the deadline."""

    different: int = 0
    lost: int = 0
    left: int = 0
    restarts: int = 0
    ended_s: list[float] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


def operations() -> list[messages.TrainerOp]:
    """Both jobs' operations, in turns, with saves on the way and a version at the end."""
    found: list[messages.TrainerOp] = []
    for job, lora in _JOBS.items():
        found.append(messages.CreateModel(0, job, "slackwater:models/base", lora, 3))
    for step in range(_STEPS):
        for job in _JOBS:
            found.append(messages.RunPass(0, job, encoded(step)))
            found.append(messages.StepOptimizer(0, job, ADAM))
            if step % _SAVE_EVERY == 1:
                saved = f"slackwater:checkpoints/{job}-{step}"
                found.append(messages.SaveState(0, job, saved))
    found += [messages.PublishWeights(0, job, f"{job}-end", False) for job in _JOBS]
    return [_numbered(each, op) for op, each in enumerate(found)]


def _numbered(message: messages.TrainerOp, op: int) -> messages.TrainerOp:
    return msgspec.structs.replace(message, op=op)


class Deployment:
    """The ranks of one trainer, and the pipe to rank 0."""

    def __init__(self, layout: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        parsed = Layout.parse(layout)
        rendezvous = f"file://{folder}/rendezvous-{time.monotonic_ns()}"
        self.pipe, theirs = context.Pipe()
        self.ranks: list[BaseProcess] = []
        for rank in range(parsed.ranks):
            plan = RankPlan(rank, parsed, rendezvous, _DEADLINE_S)
            pipe = theirs if rank == 0 else None
            process = context.Process(target=run_piped_worker, args=(plan, str(folder), pipe))
            process.start()
            self.ranks.append(process)
        theirs.close()
        self.frozen: set[int] = set()
        self._hurt_s: float | None = None  # when the first fault came

    def hurt(self, fault: Fault) -> None:
        process = self.ranks[fault.rank % len(self.ranks)]
        assert process.pid is not None
        if process.is_alive():
            self._hurt_s = self._hurt_s or time.monotonic()
            os.kill(process.pid, _METHODS[fault.how])
            if fault.how == "freeze":
                self.frozen.add(fault.rank % len(self.ranks))

    def answer(self, until_s: float) -> messages.FromWorker | None:
        """The next one, or None once a rank has ended (or nothing came until then)."""
        while (left_s := until_s - time.monotonic()) > 0:
            ready = wait([self.pipe, *(rank.sentinel for rank in self.ranks)], left_s)
            if self.pipe in ready:
                try:
                    data = self.pipe.recv_bytes()
                except (EOFError, OSError):
                    return None
                for frame in FrameDecoder().feed(data):
                    message = messages.decode_from_worker(frame.body)
                    if isinstance(message, messages.OpDone | messages.OpFailed):
                        return message
            elif ready:
                return None
        return None

    def close(self) -> tuple[int, float]:
        """How many ranks did not end by themselves, and how long after the first fault the others
        had ended; all are gone then.
        """
        began_s = time.monotonic()
        left = 0
        for number, rank in enumerate(self.ranks):
            if number not in self.frozen:
                rank.join(max(0.1, began_s + _DEADLINE_S + _GRACE_S - time.monotonic()))
                left += rank.is_alive()
        took_s = time.monotonic() - (self._hurt_s or began_s)
        for rank in self.ranks:
            rank.kill()
            rank.join()
        self.pipe.close()
        return left, took_s


class Run:
    """One run: the operation log, what has been answered, and the deployment of the moment."""

    def __init__(self, layout: str, folder: Path, faults: Sequence[Fault], found: Found) -> None:
        self._layout, self._folder, self._found = layout, folder, found
        self._faults = sorted(faults, key=lambda fault: fault.after)
        self._log = operations()
        self.answers: dict[int, bytes] = {}
        self.finished = False
        self.digests: dict[str, str] = {}  # of each job's last state and version

    def go(self) -> None:
        until_s = time.monotonic() + _RUN_LIMIT_S
        while not self.finished and time.monotonic() < until_s:
            deployment = Deployment(self._layout, self._folder)
            finished = False
            try:
                finished = self._drive(deployment, until_s)
            finally:
                if finished:
                    deployment.pipe.send_bytes(messages.encode(messages.Stop()))
                left, took_s = deployment.close()
                self._found.left += left
                if not finished:
                    self._found.restarts += 1
                    self._found.ended_s.append(took_s)
            self.finished = finished
        if self.finished:
            self.digests = {job: self._digest(job) for job in _JOBS}

    def _drive(self, deployment: Deployment, until_s: float) -> bool:
        """Whether the whole log was answered."""
        for message in self._to_send():
            self._hurt_if_due(deployment)
            try:
                deployment.pipe.send_bytes(messages.encode(message))
            except OSError:
                return False
            self._hurt_if_due(deployment, within=True)
            answer = deployment.answer(until_s)
            if answer is None:
                return False
            self._take(message, answer)
        return True

    def _to_send(self) -> list[messages.TrainerOp]:
        """The whole log at first; later each job from its last answered save on."""
        if not self.answers:
            return self._log
        last: dict[str, int] = {}
        for message in self._log:
            if isinstance(message, messages.SaveState) and message.op in self.answers:
                last[message.model] = message.op
        found: list[messages.TrainerOp] = []
        for message in self._log:
            saved_at = last.get(message.model, -1)
            if message.op == saved_at:
                assert isinstance(message, messages.SaveState)
                saved = message.saved
                found.append(messages.RestoreModel(message.op, message.model, saved))
            elif message.op > saved_at:
                found.append(message)
        return found

    def _hurt_if_due(self, deployment: Deployment, *, within: bool = False) -> None:
        if self._faults and self._faults[0].after <= len(self.answers):
            fault = self._faults[0]
            if within == (fault.delay_s > 0):
                self._faults.pop(0)
                time.sleep(fault.delay_s)
                deployment.hurt(fault)
                self._found.faults[fault.how] += 1

    def _take(self, sent: messages.TrainerOp, answer: messages.FromWorker) -> None:
        if isinstance(answer, messages.OpFailed):
            raise AssertionError(f"{type(sent).__name__}: {answer.error}")
        assert isinstance(answer, messages.OpDone) and answer.op == sent.op
        if isinstance(sent, messages.RestoreModel):
            return
        held = self.answers.setdefault(sent.op, answer.result)
        self._found.lost += held != answer.result

    def _digest(self, job: str) -> str:
        sums = hashlib.sha256()
        states = self._folder / "checkpoints" / f"{job}-{_STEPS - 1}"
        weights = (self._folder / "weights").glob(f"{job}-end*")
        for path in sorted([*states.iterdir(), *weights]):
            sums.update(path.name.encode() + path.read_bytes())
        return sums.hexdigest()


def run(options: BenchOptions) -> dict[str, Any]:
    """The faults, unless `--part` asks for another part alone."""
    others = {"steps": compare_steps, "engine": compare_engines}
    return others.get(options.part or "", _run_all)(options)


def _run_all(options: BenchOptions) -> dict[str, Any]:
    """Fifty disturbed runs (`--runs`), or as many as begin within an hour (`--duration`), against
    one undisturbed run of each layout.
    """
    wanted, runs = options.runs or (6 if options.quick else 50), 0
    layouts = _LAYOUTS[:2] if options.quick else _LAYOUTS
    found = Found()
    _prepare_forks()
    expected: dict[str, Run] = {}
    with tempfile.TemporaryDirectory(prefix="slackwater-ranks-") as made:
        base = Path(made) / "base"
        save_net(load_net(NET, seed=3), base)
        for layout in layouts:
            options.progress(f"undisturbed {layout}", 0.0)
            alone = _run(Path(made), layout, base, (), Found())
            assert alone.finished, "an undisturbed run ends"
            expected[layout] = alone
        until_s = time.monotonic() + (options.duration_s or _ALL_RUNS_S)
        while runs < wanted and time.monotonic() < until_s:
            draw = random.Random(options.seed * 1000 + runs)
            layout = layouts[runs % len(layouts)]
            options.progress(f"run {runs + 1} of {wanted}, {layout}", runs / wanted)
            done = _run(Path(made), layout, base, _faults(draw, layout), found)
            found.lost += done.answers != expected[layout].answers
            runs += 1
            digests = expected[layout].digests
            found.different += sum(done.digests.get(job) != digests[job] for job in _JOBS)
            options.partial(f"run {runs} of {wanted}, {layout}", _figures(found, runs))
    return _figures(found, runs) | {"runs_wanted": wanted}


def _prepare_forks() -> None:
    """The process that every rank is forked from leaves out without a word what it cannot import:
    then each rank imports it again, for seconds, and the others' deadline runs.
    """
    importlib.import_module(_PRELOADED)
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload([_PRELOADED])


def _figures(found: Found, runs: int) -> dict[str, float]:
    return {
        "runs": runs,
        "different": found.different,
        "lost": found.lost,
        "left": found.left,
        "restarts": found.restarts,
        "kills": found.faults["kill"],
        "freezes": found.faults["freeze"],
        "ended_s_max": max(found.ended_s, default=0.0),
        "deadline_s": _DEADLINE_S,
    }


def _run(made: Path, layout: str, base: Path, faults: Sequence[Fault], found: Found) -> Run:
    with tempfile.TemporaryDirectory(dir=made) as folder:
        offer_models(Path(folder), {"base": base})
        done = Run(layout, Path(folder), faults, found)
        done.go()
        return done


def _faults(draw: random.Random, layout: str) -> list[Fault]:
    """One or two of them; half in the middle of an operation."""
    last = len(operations()) - 2
    return [
        Fault(
            draw.randrange(last),
            draw.choice((0.0, draw.uniform(0.001, 0.1))),
            draw.randrange(Layout.parse(layout).ranks),
            draw.choice(tuple(_METHODS)),
        )
        for _ in range(draw.choice((1, 1, 2)))
    ]
