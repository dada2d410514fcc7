"""A node's reward process: stages models in host memory and scores texts as the broker commands.

Each device has a thread that works in order; the main thread only reads messages. A running score
completes; a queued one can be stopped. Eviction frees device memory only. A score is one prefill on
one device, so services have degree 1 (ARL-Tangram 5.3).
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import GenerationRequest
from slackwater.model.action import GpuService, ServiceShape
from slackwater.model.errors import (
    ConfigError,
    NotFoundError,
    RefusedError,
    SlackwaterError,
    UnavailableError,
    describe,
)
from slackwater.model.ids import ServiceName
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import empty_net, load_net, net_tensors
from slackwater.wire import messages, rewards, sandbox
from slackwater.wire.rewards import failure
from slackwater.worker.connection import Connection, DisconnectedError
from slackwater.worker.files import node_files
from slackwater.worker.process import base_parser, dial, pin, run_worker, secret

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_DEVICE_SHARE = 0.9
_HOST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class _StagedModel:
    """A model in host memory and its declaration to the broker."""

    net: CausalLM
    declaration: GpuService


class RewardServices:
    """A node's services; `devices[i]` is GPU i or "cpu" and runs one action at a time."""

    def __init__(self, devices: Sequence[str], config: EngineConfig) -> None:
        self._devices = [torch.device(name) for name in devices]
        self._config = config
        self._staged: dict[ServiceName, _StagedModel] = {}
        self.resident: dict[tuple[ServiceName, int], Engine] = {}  # by service and device
        self.failed: dict[str, str] = {}
        self._requests = 0

    def stage_or_fail(self, service: ServiceName, find: Callable[[], Path]) -> GpuService | None:
        """Stage a model, or record why it failed; the other services work."""
        directory = None
        try:
            directory = find()
            return self.stage(service, directory)
        except UnavailableError:
            raise  # its files are not available now: the worker restarts
        except Exception as error:
            logger.exception("reward model failed service=%s", service)
            self._staged.pop(service, None)
            # Tenants read the reason, so it must not contain the operator's paths.
            self.failed[service] = describe(error).replace(f"{directory}/", "")
            return None

    def stage(self, service: ServiceName, directory: Path) -> GpuService:
        """Read a model into host memory and try it on the first device; returns its declaration."""
        if service in self._staged:
            raise RefusedError(f"service: {service!r} is staged already; take another name")
        on_gpu = self._devices[0].type == "cuda"
        net = load_net(directory, dtype=torch.bfloat16 if on_gpu else torch.float32)
        if on_gpu:  # so that a restore runs at the speed of the bus
            for tensor in net_tensors(net).values():
                tensor.data = tensor.pin_memory()
        host_bytes = sum(tensor.nbytes for tensor in net_tensors(net).values())
        gpu_mib = -(-(host_bytes + self._config.kv_bytes) // _MIB)
        self._staged[service] = _StagedModel(
            net, GpuService(service, (ServiceShape(1, gpu_mib, 0.0),))
        )
        began_s = time.monotonic()
        self.restore(service, (0,))
        restore_s = time.monotonic() - began_s
        self.evict(service, (0,))
        degrees = (ServiceShape(1, gpu_mib, restore_s),)
        declaration = GpuService(service, degrees, host_mib=-(-host_bytes // _MIB))
        self._staged[service] = _StagedModel(net, declaration)
        return declaration

    def restore(self, service: ServiceName, gpus: Sequence[int]) -> None:
        """Copy a service from host memory to a device."""
        staged, (gpu,) = self._find_model(service), gpus
        if (service, gpu) in self.resident:
            return
        device = self._devices[gpu]
        net = empty_net(staged.net.config, staged.net.dtype, device)
        for name, tensor in net_tensors(net).items():
            tensor.copy_(net_tensors(staged.net)[name], non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.resident[service, gpu] = Engine(net, self._config)

    def evict(self, service: ServiceName, gpus: Sequence[int]) -> None:
        """Free a service's device memory."""
        (gpu,) = gpus
        engine = self.resident.pop((service, gpu), None)
        if engine is not None:
            engine.close()

    def logprobs(
        self, service: ServiceName, gpus: Sequence[int], tokens: Sequence[int]
    ) -> NDArray[np.float32]:
        """Log-probs of all tokens but the first under a resident service."""
        (gpu,) = gpus
        engine = self.resident.get((service, gpu))
        if service in self.failed:
            raise RefusedError(failure(service, self.failed[service]))
        if engine is None:
            raise UnavailableError(f"service {service!r} is not on device {gpu}; restore it first")
        if len(tokens) < 2:
            raise ConfigError.of("tokens", len(tokens), "must be at least 2")
        self._requests += 1
        engine.add(
            GenerationRequest(
                self._requests % 2**32,
                tuple(tokens),
                Sampling(max_tokens=0),
                self._config.base_version,
                scores_prompt=True,
            )
        )
        while engine.busy:
            output = engine.step()
            for failed in output.failed:
                raise RefusedError(f"service {service!r}: {failed.error}")
            for scores in output.prompt_scores:
                return np.asarray(scores.logprobs[1:], dtype=np.float32)
        raise UnavailableError(f"service {service!r} gave no score")

    def _find_model(self, service: ServiceName) -> _StagedModel:
        staged = self._staged.get(service)
        if service in self.failed:
            raise RefusedError(failure(service, self.failed[service]))
        if staged is None:
            raise NotFoundError(f"service: {service!r} is not staged here")
        return staged


class RewardWorker:
    """Connects the services of one node to the control plane."""

    def __init__(self, connection: Connection, services: RewardServices, devices: int) -> None:
        self._connection = connection
        self._services = services
        self._queues: list[queue.SimpleQueue[messages.ToWorker]] = [
            queue.SimpleQueue() for _ in range(devices)
        ]
        self._stopped: set[int] = set()
        self._waiting: set[int] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        for tasks in self._queues:
            threading.Thread(target=self._work, args=(tasks,), daemon=True).start()
        while True:
            for message in self._connection.receive(None):
                match message:
                    case messages.Stop():
                        return
                    case rewards.RestoreService() | rewards.EvictService():
                        self._queues[message.gpus[0]].put(message)
                    case rewards.ScoreTokens():
                        with self._lock:
                            self._waiting.add(message.attempt)
                        self._queues[message.gpus[0]].put(message)
                    case sandbox.StopAction(attempt, _):
                        with self._lock:
                            if attempt in self._waiting:
                                self._stopped.add(attempt)
                    case _:
                        logger.warning("not for a reward worker: %s", type(message).__name__)

    def _work(self, tasks: "queue.SimpleQueue[messages.ToWorker]") -> None:
        """One device's loop; the process exits when the control plane is lost."""
        while True:
            message = tasks.get()
            try:
                match message:
                    case rewards.RestoreService(service, gpus):
                        self._services.restore(ServiceName(service), gpus)
                    case rewards.EvictService(service, gpus):
                        self._services.evict(ServiceName(service), gpus)
                    case rewards.ScoreTokens():
                        self._score(message)
            except DisconnectedError:
                return
            except Exception:  # a later score on this device reports the reason
                logger.exception("device failed message=%s", type(message).__name__)

    def _score(self, message: rewards.ScoreTokens) -> None:
        with self._lock:
            self._waiting.discard(message.attempt)
            is_stopped = message.attempt in self._stopped
            self._stopped.discard(message.attempt)
        if is_stopped:
            self._report_end(message.attempt, "stopped", "it was stopped", 0.0)
            return
        began_s = time.monotonic()
        tokens = np.frombuffer(message.tokens, dtype="<u4").tolist()
        try:
            logprobs = self._services.logprobs(ServiceName(message.service), message.gpus, tokens)
        except (SlackwaterError, RuntimeError) as error:
            self._report_end(message.attempt, "failed", str(error), time.monotonic() - began_s)
            return
        output = {
            "score": float(np.mean(logprobs)),
            "logprobs": [round(float(logprob), 6) for logprob in logprobs],
        }
        printed = sandbox.ActionPrinted(message.attempt, "stdout", json.dumps(output).encode())
        self._report_end(message.attempt, "exited", "", time.monotonic() - began_s, printed)

    def _report_end(
        self, attempt: int, end: str, reason: str, run_s: float, *before: messages.Message
    ) -> None:
        ended = sandbox.ActionFinished(
            attempt=attempt,
            end=end,
            status=0 if end == "exited" else 1,
            reason=reason,
            launch_s=0.0,
            run_s=run_s,
            cpu_s=0.0,
            max_rss_bytes=0,
        )
        self._connection.send(*(messages.encode(message) for message in (*before, ended)))


def device_mib(devices: Sequence[str]) -> int:
    """The memory for services per device: most of a GPU, or a quarter of the machine's."""
    sizes = []
    for name in devices:
        if name.startswith("cuda"):
            total = torch.cuda.get_device_properties(torch.device(name)).total_memory
            sizes.append(int(total * _DEVICE_SHARE))
        else:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            sizes.append(int(total * _HOST_SHARE / len(devices)))
    return min(sizes) // _MIB


def main() -> None:
    parser = base_parser("A reward worker; a node's agent starts it.")
    parser.add_argument("--on", action="append", default=[], help="a device; repeat for more")
    parser.add_argument("--stage", nargs=2, action="append", default=[], metavar=("SERVICE", "URI"))
    parser.add_argument("--kv-mb", type=int, default=256, help="KV cache of each service")
    parser.add_argument("--device-mib", type=int, default=0, help="for services; default: most")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    devices = options.on or [options.device]
    on_gpu = devices[0].startswith("cuda")
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError.of("rewards: devices", devices, "must be ['cpu']: no CUDA device is here")
    config = EngineConfig(
        kv_bytes=options.kv_mb * _MIB,
        page_bytes=(32 if on_gpu else 2) * _MIB,
        max_step_tokens=8192 if on_gpu else 512,
    )
    files = node_files(options.files, secret(), pin())
    services = RewardServices(devices, config)
    staged = [
        services.stage_or_fail(ServiceName(name), partial(files.model, uri))
        for name, uri in options.stage
    ]
    facts = rewards.RewardFacts(
        node=options.node,
        devices=devices,
        device_mib=options.device_mib or device_mib(devices),
        services=[declaration for declaration in staged if declaration is not None],
        failed=services.failed,
    )
    hello = messages.Hello(options.worker, "rewards", rewards=facts)
    with dial(options.connect, hello) as connection:
        RewardWorker(connection, services, len(devices)).run()


if __name__ == "__main__":
    run_worker(main)
