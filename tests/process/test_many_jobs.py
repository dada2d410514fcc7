"""Several jobs with an adapter each on one base model and two real engines: nobody pushes another's
versions out.
"""

import asyncio
from pathlib import Path

import pytest

from benchmarks.fleet.jobs import JobsPlan, many_jobs
from benchmarks.options import BenchOptions
from harness.live_fleet import FleetPlan

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


def test_each_engine_pulls_each_version_once_and_no_turn_waits_for_an_evicted_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    plan = JobsPlan(jobs=6, versions=3, turns=4)
    found = asyncio.run(many_jobs(FleetPlan(tiny_model, tmp_path), plan, BenchOptions()))
    assert found["pulls_per_version_and_engine"] == 1
    assert found["most_pulls_of_a_version_by_an_engine"] == 1
    assert found["turns_that_waited_for_an_evicted_version"] == 0
    assert (found["turns"], found["failed_turns"]) == (6 * 3 * 4, 0)
