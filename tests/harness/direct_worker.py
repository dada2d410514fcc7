"""A worker process without a node agent, for measurements and process tests that need nothing but
an engine.
"""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from harness import forked_service
from harness.preloaded_programs import AwaitedProgram
from slackwater.model.ids import WorkerId
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.wire.agent import SECRET


def offer_models(folder: Path, models: Mapping[str, Path]) -> None:
    """Let workers of the folder find models by URI."""
    StateDirectory(folder).write_models(models)


async def spawn_directly(
    plan: WorkerPlan, worker: WorkerId, connect: str, secret: str, folder: Path
) -> AwaitedProgram:
    """Start the process as an agent would; the folder is its files and its log's place."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    environment |= {SECRET: secret, "OMP_NUM_THREADS": "1"}
    place = ("--connect", connect, "--worker", worker, "--files", f"folder:{folder}")
    words = (*place, *plan.arguments)
    with (folder / f"{plan.name}.log").open("ab") as log:
        start = forked_service.programs().start
        started = await asyncio.to_thread(start, plan.module, words, log, environment=environment)
    return AwaitedProgram(started)
