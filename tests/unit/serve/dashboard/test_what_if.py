"""What the planner is asked about the current jobs."""

import asyncio

import pytest

from slackwater.serve.dashboard.source import PlannedFleet, PlannedJob
from slackwater.serve.dashboard.what_if import FleetChange, Planner, scale_to_planner_units


def test_times_of_small_models_are_planned_in_another_unit_with_the_same_ratios() -> None:
    up, down = PlannedJob("up", 0.75, 0.5, 0.1, 2.5), PlannedJob("down", 4.0, 0.5, 0.0, 2.5)
    first, second = scale_to_planner_units((up, down))
    assert (first.rollout_s, first.train_s, first.sync_s) == pytest.approx((1.5, 1.0, 0.2))
    assert (second.rollout_s, second.train_s) == pytest.approx((8.0, 1.0))
    long = PlannedJob("long", 60.0, 30.0, 1.0, 2.0)
    assert scale_to_planner_units((long,)) == [long]
    nothing = scale_to_planner_units((PlannedJob("nothing", 2.0, 0.0, 0.0, 2.0),))[0]
    assert (nothing.rollout_s, nothing.train_s) == (2000.0, 1.0)


@pytest.mark.timeout(240)
def test_jobs_with_phases_of_fractions_of_a_second_have_a_plan() -> None:
    jobs = (PlannedJob("up", 0.75, 0.5, 0.0, 2.5), PlannedJob("down", 0.63, 0.6, 0.0, 2.5))
    fleet = PlannedFleet(1, 1, placement="group", jobs=jobs)
    found = asyncio.run(Planner().compare(fleet, FleetChange(rollout_nodes=1)))
    assert found["now"]["placed"] == found["then"]["placed"] == 2
    assert found["now"]["nodes_used"] == 2 and found["then"]["rollout_nodes"] == 2
