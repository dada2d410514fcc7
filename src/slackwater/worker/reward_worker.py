"""A node's reward process: stages models and scores texts as the broker commands.

Each device has a thread that works in order; the main thread only reads messages. A running score
completes; a queued one can be stopped.
"""

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from slackwater.engine.config import EngineConfig
from slackwater.model.errors import ConfigError, SlackwaterError
from slackwater.model.ids import ServiceName
from slackwater.wire import messages, rewards, sandbox
from slackwater.worker.connection import Connection, DisconnectedError
from slackwater.worker.files import node_files
from slackwater.worker.process import base_parser, dial, pin, run_worker, secret
from slackwater.worker.reward_services import RewardServices

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_SHARE_OF_DEVICE = 0.9
_SHARE_OF_HOST = 0.25


class RewardWorker:
    """Between one connection and the services of one node."""

    def __init__(self, connection: Connection, services: RewardServices, devices: int) -> None:
        self._connection = connection
        self._services = services
        self._lines: list[queue.SimpleQueue[messages.ToWorker]] = [
            queue.SimpleQueue() for _ in range(devices)
        ]
        self._stopped: set[int] = set()
        self._waiting: set[int] = set()
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run until stopped."""
        for line in self._lines:
            threading.Thread(target=self._work, args=(line,), daemon=True).start()
        while True:
            for message in self._connection.receive(None):
                match message:
                    case messages.Stop():
                        return
                    case rewards.RestoreService() | rewards.EvictService():
                        self._lines[message.gpus[0]].put(message)
                    case rewards.ScoreTokens():
                        with self._lock:
                            self._waiting.add(message.attempt)
                        self._lines[message.gpus[0]].put(message)
                    case sandbox.StopAction(attempt, _):
                        with self._lock:
                            if attempt in self._waiting:
                                self._stopped.add(attempt)
                    case _:
                        logger.warning("not for a reward worker: %s", type(message).__name__)

    def _work(self, line: "queue.SimpleQueue[messages.ToWorker]") -> None:
        """One device's loop; the process exits when the control plane is lost."""
        while True:
            message = line.get()
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
            except Exception:  # a score on this device will say why it cannot be given
                logger.exception("device failed message=%s", type(message).__name__)

    def _score(self, message: rewards.ScoreTokens) -> None:
        with self._lock:
            self._waiting.discard(message.attempt)
            is_stopped = message.attempt in self._stopped
            self._stopped.discard(message.attempt)
        if is_stopped:
            self._over(message.attempt, "stopped", "it was stopped", 0.0)
            return
        began_s = time.monotonic()
        tokens = np.frombuffer(message.tokens, dtype="<u4").tolist()
        try:
            found = self._services.logprobs(ServiceName(message.service), message.gpus, tokens)
        except (SlackwaterError, RuntimeError) as error:
            self._over(message.attempt, "failed", str(error), time.monotonic() - began_s)
            return
        said = {"score": float(np.mean(found)), "logprobs": [round(float(one), 6) for one in found]}
        printed = sandbox.ActionPrinted(message.attempt, "stdout", json.dumps(said).encode())
        self._over(message.attempt, "exited", "", time.monotonic() - began_s, printed)

    def _over(
        self, attempt: int, end: str, reason: str, run_s: float, *first: messages.Message
    ) -> None:
        over = sandbox.ActionOver(
            attempt=attempt,
            end=end,
            status=0 if end == "exited" else 1,
            reason=reason,
            launch_s=0.0,
            run_s=run_s,
            cpu_s=0.0,
            max_rss_bytes=0,
        )
        self._connection.send(*(messages.encode(message) for message in (*first, over)))


def device_mib(devices: Sequence[str]) -> int:
    """The memory for services per device: most of a GPU, or a quarter of the machine's."""
    found = []
    for name in devices:
        if name.startswith("cuda"):
            total = torch.cuda.get_device_properties(torch.device(name)).total_memory
            found.append(int(total * _SHARE_OF_DEVICE))
        else:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            found.append(int(total * _SHARE_OF_HOST / len(devices)))
    return min(found) // _MIB


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
        services=[declared for declared in staged if declared is not None],
        failed=services.failed,
    )
    hello = messages.Hello(options.worker, "rewards", rewards=facts)
    with dial(options.connect, hello) as connection:
        RewardWorker(connection, services, len(devices)).run()


if __name__ == "__main__":
    run_worker(main)
