"""Reward models for the action broker: staged in host memory, restored on demand (ARL-Tangram 5.3).

Eviction frees device memory only; the host copy is complete. A score is one prefill on one device,
so services have degree 1.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
)
from slackwater.model.ids import ServiceName
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.loading import empty_net, load_net, net_tensors
from slackwater.wire.rewards import failure

logger = logging.getLogger(__name__)

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Staged:
    """A model in host memory and its declaration to the broker."""

    net: CausalLM
    declared: GpuService


class RewardServices:
    """A node's services; `devices[i]` is GPU i or "cpu" and runs one action at a time."""

    def __init__(self, devices: Sequence[str], config: EngineConfig) -> None:
        self._devices = [torch.device(name) for name in devices]
        self._config = config
        self._staged: dict[ServiceName, _Staged] = {}
        self._resident: dict[tuple[ServiceName, int], Engine] = {}
        self.failed: dict[str, str] = {}
        self._requests = 0

    def stage_or_fail(self, service: ServiceName, find: Callable[[], Path]) -> GpuService | None:
        """Stage a model, or record why it failed; the other services work."""
        directory = None
        try:
            directory = find()
            return self.stage(service, directory)
        except UnavailableError:
            raise  # its files cannot be fetched just now: the worker starts again
        except Exception as error:
            logger.exception("reward model failed service=%s", service)
            self._staged.pop(service, None)
            known = isinstance(error, SlackwaterError)
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            # Tenants read it, and paths are the operator's.
            self.failed[service] = reason.replace(f"{directory}/", "")
            return None

    def stage(self, service: ServiceName, directory: Path) -> GpuService:
        """Read a model into host memory and try it on the first device; returns its declaration."""
        if service in self._staged:
            raise RefusedError(f"service: {service!r} is staged already; take another name")
        on_gpu = self._devices[0].type == "cuda"
        net = load_net(directory, dtype=torch.bfloat16 if on_gpu else torch.float32)
        if on_gpu:  # so that a restore goes at the speed of the bus
            for tensor in net_tensors(net).values():
                tensor.data = tensor.pin_memory()
        host_bytes = sum(tensor.nbytes for tensor in net_tensors(net).values())
        gpu_mib = -(-(host_bytes + self._config.kv_bytes) // _MIB)
        self._staged[service] = _Staged(net, GpuService(service, (ServiceShape(1, gpu_mib, 0.0),)))
        began_s = time.monotonic()
        self.restore(service, (0,))
        restore_s = time.monotonic() - began_s
        self.evict(service, (0,))
        degrees = (ServiceShape(1, gpu_mib, restore_s),)
        declared = GpuService(service, degrees, host_mib=-(-host_bytes // _MIB))
        self._staged[service] = _Staged(net, declared)
        return declared

    def residents(self) -> list[tuple[ServiceName, int]]:
        """Resident (service, device) pairs."""
        return sorted(self._resident)

    def restore(self, service: ServiceName, gpus: Sequence[int]) -> None:
        """Copy a service from host memory to a device."""
        staged, (gpu,) = self._find(service), gpus
        if (service, gpu) in self._resident:
            return
        device = self._devices[gpu]
        net = empty_net(staged.net.config, staged.net.dtype, device)
        for name, tensor in net_tensors(net).items():
            tensor.copy_(net_tensors(staged.net)[name], non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._resident[service, gpu] = Engine(net, self._config)

    def evict(self, service: ServiceName, gpus: Sequence[int]) -> None:
        """Free a service's device memory."""
        (gpu,) = gpus
        engine = self._resident.pop((service, gpu), None)
        if engine is not None:
            engine.close()

    def score(self, service: ServiceName, gpus: Sequence[int], tokens: Sequence[int]) -> float:
        """The mean log-prob of a text's tokens, as a teacher's or judge's score."""
        return float(np.mean(self.logprobs(service, gpus, tokens)))

    def logprobs(
        self, service: ServiceName, gpus: Sequence[int], tokens: Sequence[int]
    ) -> NDArray[np.float32]:
        """Log-probs of all tokens but the first under a resident service."""
        (gpu,) = gpus
        engine = self._resident.get((service, gpu))
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
                prompt_logprobs=True,
            )
        )
        while engine.busy:
            output = engine.step()
            for failed in output.failed:
                raise RefusedError(f"service {service!r}: {failed.error}")
            for scores in output.prompt_scores:
                return np.asarray(scores.logprobs[1:], dtype=np.float32)
        raise UnavailableError(f"service {service!r} gave no score")

    def _find(self, service: ServiceName) -> _Staged:
        found = self._staged.get(service)
        if service in self.failed:
            raise RefusedError(failure(service, self.failed[service]))
        if found is None:
            raise NotFoundError(f"service: {service!r} is not staged here")
        return found
