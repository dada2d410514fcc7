"""The ranks of a trainer worker, told what to do by a list instead of a control plane."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from harness.rank_engine import generate_on_ranks
from harness.rank_training import ADAM, batch, train
from slackwater.model.errors import ConfigError
from slackwater.model.session import LoraShape
from slackwater.nets.ranks import RankPlan, Ranks, exit_at_once
from slackwater.weights.plan.layout import Layout
from slackwater.wire import messages
from slackwater.wire.batches import Array, Example, PassBatch, encode_batch
from slackwater.wire.frames import FrameDecoder
from slackwater.worker.connection import HasFileno
from slackwater.worker.files import SharedFiles
from slackwater.worker.trainer_worker import TrainerWorker

MODEL = "m"


def encoded(step: int, part: int = 0, *, wrong: bool = False) -> bytes:
    examples = []
    for datum in batch(step, part):
        inputs = {
            name: Array.from_numpy(np.asarray(values)) for name, values in datum.inputs.items()
        }
        if wrong:
            inputs.pop("advantages")
        examples.append(Example(Array.from_numpy(datum.tokens), inputs))
    return encode_batch(PassBatch("importance_sampling", {}, False, examples))


class ScriptedConnection:
    """Gives one message after the answer to the one before, then nothing; keeps every answer."""

    lost = False

    def __init__(self, script: Sequence[messages.ToWorker], answers: Path) -> None:
        self._script, self._answers = list(script), answers
        self._ready = True

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> list[messages.ToWorker]:
        del timeout_s, wakers
        if not self._ready or not self._script:
            return []
        self._ready = False
        return [self._script.pop(0)]

    def send(self, *frames: bytes) -> None:
        for frame in FrameDecoder().feed(b"".join(frames)):
            message = messages.decode_from_worker(frame.body)
            kind = type(message).__name__
            with self._answers.open("a") as out:
                error = getattr(message, "error", "")
                out.write(json.dumps([kind, getattr(message, "op", None), error]) + "\n")
            self._ready = self._ready or kind in ("OpDone", "OpFailed")


def script() -> list[messages.ToWorker]:
    """Two steps with a pass that is refused between them, a save, a restore, and two versions."""
    full = LoraShape(0)
    return [
        messages.CreateModel(0, MODEL, "slackwater:models/base", full, 3),
        messages.RunPass(1, MODEL, encoded(0)),
        messages.StepOptimizer(2, MODEL, ADAM),
        messages.PublishWeights(3, MODEL, "v1"),
        messages.RunPass(4, MODEL, encoded(1, wrong=True)),
        messages.SaveState(5, MODEL, "slackwater:checkpoints/one"),
        messages.RestoreModel(6, MODEL, "slackwater:checkpoints/one", ""),
        messages.RestoreModel(7, MODEL, "slackwater:checkpoints/none", ""),
        messages.RunPass(8, MODEL, encoded(1)),
        messages.RunPass(9, MODEL, encoded(1, 1)),
        messages.StepOptimizer(10, MODEL, ADAM),
        messages.PublishWeights(11, MODEL, "v2", durable=False),
    ]


def refuse_another_version(plan: RankPlan, folder: Path) -> None:
    """Join with ranks that were told another layout; `refused0` and `refused1` say how it ended."""
    told = Layout.parse(("dp=2", "tp=2")[plan.rank])
    rendezvous = f"{plan.rendezvous}-refused"
    try:
        Ranks.join(replace(plan, layout=told, rendezvous=rendezvous))
    except ConfigError as error:
        (folder / f"refused{plan.rank}").write_text(str(error))
    dist.destroy_process_group()


def train_then_work(plan: RankPlan, *, layouts: Sequence[str], steps: int, folder: str) -> None:
    """`train`, generate with the same ranks as an engine, follow the script, then wait for more
    until the process is killed.
    """
    refuse_another_version(plan, Path(folder))
    train(plan, layouts=layouts, steps=steps, folder=folder)
    engine_plan = replace(plan, layout=Layout.parse("tp=2"), rendezvous=f"{plan.rendezvous}-engine")
    generate_on_ranks(Ranks.join(engine_plan), Path(folder))
    dist.destroy_process_group()
    ranks = Ranks.join(plan)
    connection = None
    if ranks.leads:
        assert ranks.tp is None
        for group in (dist.group.WORLD, ranks.dp_group, ranks.mesh.get_group("tp")):
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            assert timeout.total_seconds() == plan.deadline_s, f"{timeout} of {group.group_desc}"
        connection = ScriptedConnection(script(), Path(folder) / "answers")
    files = SharedFiles(Path(folder))
    TrainerWorker(connection, files, "cpu", ranks=ranks).run()  # type: ignore[arg-type]


class PipedConnection:
    """A pipe to whoever plays the control plane."""

    lost = False

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def receive(self, timeout_s: float | None, *wakers: HasFileno) -> list[messages.ToWorker]:
        del wakers
        if not self._pipe.poll(timeout_s):
            return []
        frames = FrameDecoder().feed(self._pipe.recv_bytes())
        return [messages.decode_to_worker(frame.body) for frame in frames]

    def send(self, *frames: bytes) -> None:
        self._pipe.send_bytes(b"".join(frames))


def run_piped_worker(plan: RankPlan, folder: str, pipe: Pipe | None) -> None:
    """One rank of a trainer worker, until it is told to stop."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # lost ranks are what is asked for
    connection = None if pipe is None else PipedConnection(pipe)
    try:
        ranks = Ranks.join(plan)
        files = SharedFiles(Path(folder))
        TrainerWorker(connection, files, "cpu", ranks=ranks).run()  # type: ignore[arg-type]
    except (EOFError, OSError):  # the one at the other end of the pipe has gone, or a rank
        exit_at_once()
    os._exit(0)
