"""How fast an engine decodes while it pulls a version, over the same engine at rest.

The relay is another process; the engine steps in this one, and its puller works in a thread beside
it. Every pull is compared with the steps right before and right after it, so that whatever else the
machine does falls on both; the figure is the median of the pulls. A window has all that the
stepping thread does: steps, and what it does for the pull between them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.weights.relay_process import SECRET_VARIABLE
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.payload import Payload
from slackwater.model.sampling import Sampling
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net, net_tensors
from slackwater.nets.lora import lora_meta
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.client import RelayClient
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.publisher import RelayPublisher
from slackwater.worker.puller import VersionPuller, WeightLane

_SECRET = "of this measurement"
_REQUESTS = 8
_STEPS = 8  # of a window at rest before a pull has shown how many it takes


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
        stocker = RelayPublisher(relay, _SECRET.encode())
        lane = WeightLane(
            DirectoryWeightStore(Path(stack.enter_context(tempfile.TemporaryDirectory()))),
            relay,
            secret=_SECRET.encode(),
            node="node",
            own_process=True,
        )
        puller = VersionPuller(engine, lane)
        for each in (lane, puller):
            stack.callback(each.close)
        client = stack.enter_context(RelayClient(relay, _SECRET.encode()))
        return _measured(engine, stocker, client, puller, tensors, pulls, seed)


def _relay(stack: ExitStack) -> tuple[str, int]:
    """A node's relay in a process of its own; its address."""
    options = ("--memory-gb", "2", "--node", "node", "--shared")
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.weights.relay_process", *options],
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
    stocker: RelayPublisher,
    relay: RelayClient,
    puller: VersionPuller,
    tensors: dict[str, torch.Tensor],
    pulls: int,
    seed: int,
) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    stepping = _Stepping(engine)
    pairs: list[tuple[_Window, _Window]] = []
    for pull in range(pulls + 2):
        _change(tensors, generator)
        name = f"v{pull}"
        manifest = stocker.stock("model", host_version(name, tensors, lora_meta(None)))
        base = min((base for base in manifest.sizes), key=manifest.bytes_of)
        steps = pairs[-1][1].steps if pairs else _STEPS
        stepping.steps(2)  # publishing has had the caches
        before = stepping.steps(steps)
        puller.request(name, [Payload(name, base)], keep=True)
        during = stepping.until(lambda: bool(puller.advance()))
        after = stepping.steps(steps)
        pairs.append((before + after, during))
        if pull:
            engine.versions.drop(f"v{pull - 1}")
        for each in manifest.sizes:
            relay.drop(Payload(name, each))
    pairs = pairs[
        2:
    ]  # the first compiles and takes the whole, the second makes the last of the places for weights
    rates = [rest.step_s / during.step_s for rest, during in pairs]
    low, median, high = statistics.quantiles(rates, n=4)
    return {
        "decode_steps_during_pulls": sum(during.steps for _, during in pairs),
        "decode_while_pulling": median,
        "decode_while_pulling_quarters": [low, high],
        "decode_cpu_while_pulling": statistics.median(
            rest.cpu_step_s / during.cpu_step_s for rest, during in pairs
        ),
        "decode_processor_share": statistics.median(rest.cpu_s / rest.took_s for rest, _ in pairs),
        "pull_beside_decode_s": statistics.median(during.took_s for _, during in pairs),
        "pull_cpu_s": statistics.median(during.beside_cpu_s for _, during in pairs),
    }


def _change(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """A hundredth of every tensor's elements, here and there."""
    for tensor in tensors.values():
        flat = tensor.view(-1)
        places = torch.randint(len(flat), (max(len(flat) // 100, 1),), generator=generator)
        flat[places] *= 1.01


@dataclass(frozen=True, slots=True)
class _Window:
    """Steps one after the other, and all that the stepping thread did between them."""

    steps: int
    took_s: float
    cpu_s: float
    beside_cpu_s: float  # of this process's other threads

    def __add__(self, other: "_Window") -> "_Window":
        return _Window(
            self.steps + other.steps,
            self.took_s + other.took_s,
            self.cpu_s + other.cpu_s,
            self.beside_cpu_s + other.beside_cpu_s,
        )

    @property
    def step_s(self) -> float:
        return self.took_s / self.steps

    @property
    def cpu_step_s(self) -> float:
        return self.cpu_s / self.steps


class _Stepping:
    """Steps an engine that always has the same number of requests under way, of lengths that do not
    end together.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0

    def steps(self, count: int) -> _Window:
        left = iter(range(count - 1, -1, -1))
        return self.until(lambda: next(left) == 0)

    def until(self, is_over: Callable[[], bool]) -> _Window:
        """Step until it is over, which is asked after every step."""
        began_s, began_cpu_s, began_all_s = (
            time.perf_counter(), time.thread_time(), time.process_time(),
        )  # fmt: skip
        steps = 0
        while True:
            self._keep_busy()
            self._engine.step()
            steps += 1
            if is_over():
                break
        cpu_s = time.thread_time() - began_cpu_s
        all_s = time.process_time() - began_all_s
        return _Window(steps, time.perf_counter() - began_s, cpu_s, all_s - cpu_s)

    def _keep_busy(self) -> None:
        while self._engine.gauges()["running"] + self._engine.gauges()["waiting"] < _REQUESTS:
            number = self._number
            params = Sampling(max_tokens=200 + 37 * number % 200, temperature=1.0, seed=number)
            prompt = (1, 2, 3, number % 4000)
            self._engine.add(GenerationRequest(number, prompt, params, "base"))
            self._number += 1
