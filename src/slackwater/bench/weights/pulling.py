"""How fast an engine decodes while it pulls a version, over the same engine at rest.

The relay is another process; the engine steps in this one, and its puller works in a thread beside it. Windows with and without a
pull take turns, so that whatever else the machine does falls on both.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.cargo import Cargo
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.__main__ import SECRET_VARIABLE
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.stocker import Stocker
from slackwater.worker.published import lora_meta
from slackwater.worker.puller import VersionPuller
from slackwater.worker.weight_lane import WeightLane

_SECRET = "of this measurement"
_REQUESTS = 8


def decode_while_pulling(pulls: int, seed: int) -> dict[str, object]:
    """The rate of steps during pulls over that between them; and how long a pull took."""
    torch.set_num_threads(1)
    config = NetConfig(
        family="llama", vocab_size=4096, hidden_size=512, num_layers=8, num_heads=8,
        num_kv_heads=4, head_dim=64, ffn_size=1408, max_positions=4096, init_std=0.02, tied=True,
    )  # fmt: skip
    net = load_net(config, seed=seed)
    tensors = {name: tensor.clone() for name, tensor in net_tensors(net).items()}
    engine = Engine(
        net,
        EngineConfig(
            kv_bytes=256 << 20, max_running=_REQUESTS, max_full_versions=3, base_version="base"
        ),
    )
    with ExitStack() as stack:
        relay = _relay(stack)
        stocker = Stocker(relay, _SECRET.encode())
        lane = WeightLane(
            DirectoryWeightStore(Path(stack.enter_context(tempfile.TemporaryDirectory()))),
            relay,
            secret=_SECRET.encode(),
            worker="engine",
            node="node",
        )
        puller = VersionPuller(engine, lane)
        for each in (lane, puller):
            stack.callback(each.close)
        return _measured(engine, stocker, puller, tensors, pulls, seed)


def _relay(stack: ExitStack) -> tuple[str, int]:
    """A node's relay in a process of its own; its address."""
    options = ("--memory-gb", "2", "--node", "node", "--shared")
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "slackwater.weights.relay", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {SECRET_VARIABLE: _SECRET},
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())
    return address["host"], address["port"]


def _measured(
    engine: Engine,
    stocker: Stocker,
    puller: VersionPuller,
    tensors: dict[str, torch.Tensor],
    pulls: int,
    seed: int,
) -> dict[str, object]:
    torch.manual_seed(seed)
    number = 0
    rested: list[tuple[float, float]] = []
    pulling: list[tuple[float, float]] = []
    took: list[float] = []
    for pull in range(pulls + 1):
        for tensor in tensors.values():
            mask = torch.rand(tensor.shape) < 0.01
            tensor[mask] *= 1.01
        name = f"v{pull}"
        manifest = stocker.stock("model", host_version(name, tensors, lora_meta(None)))
        base = min((base for base in manifest.sizes), key=manifest.bytes_of)
        began_s = time.perf_counter()
        puller.ask(name, [Cargo(name, base)], keep=True)
        during: list[tuple[float, float]] = []
        while not puller.settle():
            number = _keep_busy(engine, number)
            during.append(_step_s(engine))
        took.append(time.perf_counter() - began_s)
        after: list[tuple[float, float]] = []
        while len(after) < max(len(during), 8):
            number = _keep_busy(engine, number)
            after.append(_step_s(engine))
        if pull:  # the first compiles and takes the whole
            pulling += during
            rested += after
            engine.drop_version(f"v{pull - 1}")
    (rested_s, rested_cpu_s), (pulling_s, pulling_cpu_s) = (
        (statistics.fmean(wall), statistics.fmean(cpu))
        for wall, cpu in (zip(*rested, strict=True), zip(*pulling, strict=True))
    )
    return {
        "decode_steps_during_pulls": len(pulling),
        "decode_while_pulling": rested_s / pulling_s,
        "decode_cpu_while_pulling": rested_cpu_s / pulling_cpu_s,
        "decode_processor_share": rested_cpu_s / rested_s,
        "pull_beside_decode_s": statistics.median(took[1:]),
    }


def _step_s(engine: Engine) -> tuple[float, float]:
    """How long a step took, and how long this thread had a processor in it."""
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    engine.step()
    return time.perf_counter() - began_s, time.thread_time() - began_cpu_s


def _keep_busy(engine: Engine, number: int) -> int:
    """Always the same number of requests under way."""
    while engine.gauges()["running"] + engine.gauges()["waiting"] < _REQUESTS:
        params = Sampling(max_tokens=400, temperature=1.0, seed=number)
        engine.add(GenerationRequest(number, (1, 2, 3, number % 4000), params, "base"))
        number += 1
    return number
