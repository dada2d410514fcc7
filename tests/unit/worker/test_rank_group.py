"""The processes of a deployment: which devices each of them sees."""

import json
import sys
from pathlib import Path

from slackwater.model.device import CUDA, Device
from slackwater.model.ids import NodeId
from slackwater.wire.agent import RANK, StartWorker
from slackwater.worker.rank_group import RankGroup
from slackwater.worker.template import WorkerTemplate

SHOW = f"""
import json, os
print(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("{RANK}")]), flush=True)
"""
GPUS = tuple(Device(NodeId("n"), i, CUDA, visible=f"GPU-{i}") for i in (2, 3))


def seen(order: StartWorker, logs: Path) -> list[list[str | None]]:
    """What each process of the worker has in its environment."""
    group = RankGroup(order, [sys.executable, "-c", SHOW], {}, logs, WorkerTemplate())
    for process in group.processes:
        process.wait(240)
    group.wait()
    return [json.loads(log.read_text()) for log in sorted(logs.glob("*.log"))]


def test_a_rank_sees_its_own_device_and_a_server_sees_all_of_its_deployment(tmp_path: Path) -> None:
    ranks, server = tmp_path / "ranks", tmp_path / "server"
    for logs in (ranks, server):
        logs.mkdir()
    order = StartWorker("w.1", "w", "module", [], "key", GPUS, "tp=2")
    assert seen(order, ranks) == [["GPU-2", "0"], ["GPU-3", "1"]]
    alone = StartWorker("w.1", "w", "module", [], "key", GPUS, "tp=2", one_process=True)
    assert seen(alone, server) == [["GPU-2,GPU-3", None]]
