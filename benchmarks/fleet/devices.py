"""bench devices: jobs of 1 to 64 devices come and go on a fleet of 32 nodes with 64 devices each.

A job that gets no devices waits, in order, until others have ended. Each decision of the device
allocator is measured in processor time, and the allocator's invariants are checked after it.
"""

import random
import time
from typing import Any

import numpy as np

from benchmarks.options import BenchOptions
from slackwater.control.devices.allocator import DeviceAllocator
from slackwater.control.devices.messages import (
    AllocationCommand,
    AllocationEvent,
    DeploymentReleased,
    DeploymentsRequested,
    DevicesReported,
    StartDeployment,
)
from slackwater.model.device import CUDA, DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, NodeId

_NODES, _PER_NODE, _PER_DOMAIN = 32, 64, 8
_SIZES = (1, 1, 2, 4, 8, 8, 16, 32, 64)
_CHECK_EVERY = 10


class TimedAllocator:
    """The allocator, the time of its decisions, and its invariants."""

    def __init__(self) -> None:
        self._allocator = DeviceAllocator()
        self.took_s: list[float] = []

    def handle(self, event: AllocationEvent) -> tuple[AllocationCommand, ...]:
        began_s = time.thread_time()
        commands = tuple(self._allocator.handle(event))
        self.took_s.append(time.thread_time() - began_s)
        if len(self.took_s) % _CHECK_EVERY == 0:
            self._allocator.check_integrity()
        return commands


def run(options: BenchOptions) -> dict[str, Any]:
    """Two thousand jobs; two hundred with `--quick`."""
    jobs = 200 if options.quick else 2000
    draw = random.Random(options.seed)
    fleet = TimedAllocator()
    for number in range(_NODES):
        node = NodeId(f"n{number:02}")
        devices = tuple(
            Device(node, i, CUDA, 80_000, str(i // _PER_DOMAIN), hardware=f"{node}#{i}")
            for i in range(_PER_NODE)
        )
        fleet.handle(DevicesReported(0.0, node, devices))
    fleet.took_s.clear()
    running: list[DeploymentId] = []
    refused = within_domain = placed_in_domain = 0
    for number in range(jobs):
        options.progress("jobs that come and go", number / jobs)
        size = draw.choice(_SIZES)
        request = DeploymentRequest(DeploymentId(f"job{number}"), size, kind=CUDA, memory_mb=1)
        started: AllocationCommand | None = None
        while not isinstance(started, StartDeployment):
            (started,) = fleet.handle(DeploymentsRequested(float(number), (request,)))
            if not isinstance(started, StartDeployment):
                refused += 1
                ended = running.pop(draw.randrange(len(running)))
                fleet.handle(DeploymentReleased(float(number), ended))
        running.append(request.deployment)
        if size <= _PER_DOMAIN:
            within_domain += 1
            placed_in_domain += len({device.domain for device in started.devices}) == 1
    took_ms = 1e3 * np.array(fleet.took_s)
    return {
        "jobs": jobs,
        "devices": _NODES * _PER_NODE,
        "decisions": len(took_ms),
        "waits": refused,
        "decision_p50_ms": float(np.percentile(took_ms, 50)),
        "decision_p99_ms": float(np.percentile(took_ms, 99)),
        "decision_max_ms": float(took_ms.max()),
        "within_one_domain_share": placed_in_domain / max(within_domain, 1),
    }
