"""A worker process without a node agent, for measurements and process tests that need nothing but
an engine.
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from slackwater.model.ids import WorkerId
from slackwater.runtime.launch.agents import SECRET_VARIABLE
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.store.state_directory import StateDirectory


def offer_models(folder: Path, models: Mapping[str, Path]) -> None:
    """Let workers of the folder find models by URI."""
    StateDirectory(folder).write_models(models)


async def spawn_directly(
    plan: WorkerPlan, worker: WorkerId, connect: str, secret: str, folder: Path
) -> asyncio.subprocess.Process:
    """Start the process as an agent would; the folder is its files and its log's place."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    environment |= {SECRET_VARIABLE: secret, "OMP_NUM_THREADS": "1"}
    place = ("--connect", connect, "--worker", worker, "--files", f"folder:{folder}")
    with (folder / f"{plan.name}.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            plan.module,
            *place,
            *plan.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
