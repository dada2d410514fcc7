"""bench devices: jobs of 1 to 64 devices come and go.

The device allocator alone, on 32 nodes with 64 devices each: a job that gets no devices waits, in
order, until others have ended. Then the whole co-scheduler (`coschedule_`), on two pools of nodes
with 8 devices each, which jobs share as parts and as whole nodes: every event of their lives, with
crashes and lost nodes, in virtual time. Each decision is measured in processor time, and the
invariants are checked as it goes.
"""

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.options import BenchOptions
from slackwater.control.coschedule.commands import Command, StartJob
from slackwater.control.coschedule.events import Event, JobArrived, JobFinished, NodeLost
from slackwater.control.coschedule.scheduler import CoScheduler
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
from slackwater.model.ids import DeploymentId, JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.sim.cluster.scenario import ClusterScenario, FaultConfig
from slackwater.sim.cluster.simulate import new_controller
from slackwater.sim.cluster.simulated_cluster import SimulatedCluster

_NODES, _PER_NODE, _PER_DOMAIN = 32, 64, 8
_SIZES = (1, 1, 2, 4, 8, 8, 16, 32, 64)
_CHECK_EVERY = 10
_POOL_NODES = 640  # of each pool of the co-scheduler
_CROWDED = 4  # so many fewer nodes where most jobs wait
_KINDS = {JobArrived: "arrival", JobFinished: "departure", NodeLost: "lost_node"}
_APART_S = 15.0


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


class TimedScheduler:
    """The co-scheduler, the time of its decisions, and the most jobs that had a place at once."""

    def __init__(self, scheduler: CoScheduler) -> None:
        self._scheduler = scheduler
        self.took_s: dict[str, list[float]] = defaultdict(list)
        self._placed: set[JobId] = set()
        self.most_placed = 0
        self.check_integrity = scheduler.check_integrity

    def handle(self, event: Event) -> Sequence[Command]:
        began_s = time.thread_time()
        commands = self._scheduler.handle(event)
        self.took_s[_KINDS.get(type(event), "other")].append(time.thread_time() - began_s)
        if isinstance(event, JobFinished):
            self._placed.discard(event.job)
        self._placed.update(one.job for one in commands if isinstance(one, StartJob))
        self.most_placed = max(self.most_placed, len(self._placed))
        return commands


def _coscheduled(options: BenchOptions, count: int, nodes: int) -> dict[str, Any]:
    """Jobs of all sizes through the co-scheduler."""
    draw = random.Random(options.seed)
    jobs = []
    for number in range(count):
        devices = draw.choice(_SIZES)
        train = draw.choice((devices, max(devices // 2, 1)))
        profile = JobProfile(
            *(draw.uniform(100, 400), draw.uniform(50, 300), 10.0),
            rollout_state_gb=30.0 * min(devices, 8),
            train_state_gb=30.0 * min(train, 8),
            rollout_devices=devices,
            train_devices=train,
        )
        lasts = draw.randint(20, 60)
        made = (JobId(f"job{number}"), number * _APART_S, lasts, draw.uniform(1.2, 2.5), profile)
        jobs.append(JobSpec(*made))
    scenario = ClusterScenario(
        fleet=(Pool(Role.ROLLOUT, H20, nodes), Pool(Role.TRAIN, H800, nodes)),
        jobs=tuple(jobs),
        faults=FaultConfig(job_crashes_per_h=2.0, node_losses_per_h=1.0),
        seed=options.seed,
    )
    timed = TimedScheduler(new_controller(scenario))
    cluster = SimulatedCluster(scenario, scenario.jobs, timed, check_every=1000)
    cluster.run(lambda share: options.progress("jobs through the co-scheduler", share))
    rows = [body.account.row(cluster.now_s) for body in cluster.executions.values()]
    found = {
        "devices": 16 * nodes,
        "decisions": sum(map(len, timed.took_s.values())),
        "most_placed": timed.most_placed,
        "finished": sum(row.finished_s is not None for row in rows),
        "slo_attainment": float(np.mean([row.kept_slo for row in rows])),
    }
    timed.took_s["decision"] = [each for kind in timed.took_s.values() for each in kind]
    for kind in ("decision", *_KINDS.values()):
        for share in (50, 99, 100):
            took_s = np.percentile(timed.took_s[kind] or [0.0], share)
            found[f"{kind}_p{share}_ms"] = 1e3 * float(took_s)
    return found


def run(options: BenchOptions) -> dict[str, Any]:
    """Two thousand jobs; two hundred with `--quick`."""
    jobs = 200 if options.quick else 2000
    _coscheduled(options, 40, _POOL_NODES)  # compiles
    found = _allocated(options, jobs)
    options.partial("allocator", found)
    for prefix, nodes in (("coschedule", _POOL_NODES), ("crowded", _POOL_NODES // _CROWDED)):
        figures = _coscheduled(options, jobs, nodes)
        found |= {f"{prefix}_{name}": value for name, value in figures.items()}
        options.partial(prefix, figures)
    return found


def _allocated(options: BenchOptions, jobs: int) -> dict[str, Any]:
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
