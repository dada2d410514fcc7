"""The sampled timeline of a service: engines that come, are lost or drained, and jobs' time."""

from pathlib import Path

import httpx

from harness.service_plane import with_plane
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.rollout.events import InstanceJoined, InstanceLost
from slackwater.model.ids import InstanceId, JobId, TenantId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.activity import ActivitySampler
from slackwater.timeline.lanes import FAULT


def engine(name: str) -> InstanceSpec:
    return InstanceSpec(InstanceId(name), InstanceKind.SPOT, 4, 64, 1000)


def test_engines_and_jobs_are_seen_as_they_come_and_go(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        sampler = ActivitySampler(plane)
        for name in ("killed", "drained"):
            plane.controller.handle(InstanceJoined(loop_time(), engine(name)))
        plane.controller.handle(JobSubmitted(loop_time(), JobId("mine/run"), TenantId("mine")))
        sampler.sample()
        plane.instances.drained.add(InstanceId("drained"))
        for name in ("killed", "drained"):
            plane.controller.handle(InstanceLost(loop_time(), InstanceId(name), "gone"))
        sampler._last_s = sampler.now_s() - 10.0  # ten seconds pass
        sampler.sample()
        lanes = {lane.name: lane for lane in sampler.timeline.lanes()}
        assert [lane.pool for lane in lanes.values()] == ["spot engines"] * 2
        assert list(lanes["killed"].kinds) == [FAULT]
        assert list(lanes["drained"].kinds) == []
        assert all(lane.rented_s[0][1] is not None for lane in lanes.values())
        assert 10.0 <= sum(sampler.breakdown(JobId("mine/run")).values()) < 30.0

    with_plane(tmp_path, work)
