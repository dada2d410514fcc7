"""The sampled timeline of a service: engines that come, are lost or drained, and jobs' time."""

from pathlib import Path

import httpx
import pytest

from harness.service_plane import with_plane
from slackwater.control.coschedule.settings import CoscheduleSettings
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.rollout.events import InstanceJoined, InstanceLost
from slackwater.model.errors import ConfigError
from slackwater.model.ids import InstanceId, JobId, TenantId
from slackwater.model.instance import InstanceKind, InstanceSpec
from slackwater.model.job import JobProfile, JobTerms
from slackwater.runtime.live_driver import loop_time
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.services.activity import ActivitySampler
from slackwater.runtime.settings import PriceSettings
from slackwater.timeline.lanes import FAULT


def engine(name: str) -> InstanceSpec:
    return InstanceSpec(InstanceId(name), InstanceKind.SPOT, 4, 64, 1000)


def test_engines_and_jobs_are_seen_as_they_come_and_go(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        sampler = ActivitySampler(plane)
        gone = ("killed", "drained", "serves~1", "died~1")
        for name in ("serves", *gone):
            plane.controller.handle(InstanceJoined(loop_time(), engine(name)))
        plane.controller.handle(JobSubmitted(loop_time(), JobId("mine/run"), TenantId("mine")))
        sampler.sample()
        plane.instances.drained.add(InstanceId("drained"))
        for name in gone:
            plane.controller.handle(InstanceLost(loop_time(), InstanceId(name), "gone"))
        sampler._last_s = sampler.now_s() - 10.0  # ten seconds pass
        sampler.sample()
        lanes = {lane.name: lane for lane in sampler.timeline.lanes()}
        assert [lane.pool for lane in lanes.values()] == ["spot engines"] * 5
        faults = [name for name, lane in lanes.items() if list(lane.kinds) == [FAULT]]
        assert faults == ["killed", "died~1"]  # a loan of a worker that lives on was returned
        assert all(lanes[name].rented_s[0][1] is not None for name in gone)
        assert 10.0 <= sum(sampler.breakdown(JobId("mine/run")).values()) < 30.0

    with_plane(tmp_path, work)


def test_slack_is_counted_by_kind_with_what_it_saves(tmp_path: Path) -> None:
    """Two jobs share a rollout and a train node; an engine is borrowed, another one is spot."""

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        sampler = ActivitySampler(plane)
        assert plane.phases is not None and plane.controller.phases is not None
        profile = JobProfile(8.0, 6.0, rollout_state_gb=0.1, train_state_gb=0.1, model_billions=0.1)
        for name in ("a", "b"):
            job = (JobId(f"mine/{name}"), TenantId("mine"))
            plane.runtime.feed(JobSubmitted(loop_time(), *job, profile, JobTerms(9, slo=3.0)))
        borrowed = InstanceSpec(InstanceId("lent"), InstanceKind.BORROWED, 4, 64, 1000)
        for spec in (engine("cheap"), borrowed):
            plane.controller.handle(InstanceJoined(loop_time(), spec))
        sampler.sample()
        for name in ("a", "b"):
            state = plane.controller.phases.scheduler.find(JobId(f"mine/{name}"))
            assert state is not None and state.placement is not None
            state.observed_s += 14.0  # an iteration each, in the time of one
        sampler._last_s = sampler.now_s() - 14.0
        sampler.sample()
        rows = {row["kind"]: row for row in sampler.slack.rows()}
        hour = 3600.0
        assert rows["phases"]["alone"] * hour == pytest.approx(2 * 14.0 * 2, abs=0.5)
        assert rows["phases"]["used"] * hour == pytest.approx(14.0 * 2, abs=5.0)
        assert rows["phases"]["saved_dollars"] == pytest.approx(28.0 / hour * 3.6, abs=0.006)
        assert rows["spot"]["saved"] == 0.0
        assert rows["spot"]["saved_dollars"] == pytest.approx(14.0 / hour * 2.6, abs=0.002)
        assert rows["serving"]["alone"] == 0.0  # it was here, and idle
        assert "actions" not in rows and "weights" not in rows
        paid = {row["kind"]: row["dollars"] for row in sampler.slack.capacity()}
        assert paid["borrowed"] == 0.0 < paid["spot"]

    prices = PriceSettings(device_per_h=3.6, spot_device_per_h=1.0)
    settings = {"coschedule": CoscheduleSettings(placement="group"), "prices": prices}
    with_plane(tmp_path, work, **settings)


def test_a_price_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="prices: spot_device_per_h"):
        PriceSettings(spot_device_per_h=-1.0)
