"""What an action says of itself, and what it may not say."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slackwater.control.actions.events import ActionSubmitted
from slackwater.model.action import ActionSpec, GpuService, Limit, ServiceShape, WorkerCapacity
from slackwater.model.amounts import CORES, GPUS, Amounts, Efficiency, Elastic, Need
from slackwater.model.errors import ConfigError
from slackwater.model.ids import ActionId, EnvironmentId, JobId, ResourceName, ServiceName

ONE_CORE = (Need(CORES, Amounts.exactly(1)),)


def test_amounts_are_a_number_a_range_or_choices() -> None:
    assert Amounts.exactly(3).choices == (3,)
    assert Amounts.from_range(1, 4).choices == (1, 2, 3, 4)
    assert Amounts.from_choices(8, 1, 2).choices == (1, 2, 8)


@given(st.floats(0, 1), st.integers(1, 64))
def test_more_units_never_make_amdahls_work_slower(parallel: float, most: int) -> None:
    efficiency = Efficiency.amdahl(parallel, most)
    speedups = [efficiency.speedup(units) for units in range(1, most + 1)]
    assert speedups[0] == pytest.approx(1.0)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(speedups))
    assert all(0 < efficiency.value_at(units) <= 1 for units in range(1, most + 5))


def test_efficiency_is_straight_between_its_points_and_flat_outside() -> None:
    efficiency = Efficiency(((1, 1.0), (3, 0.5)))
    assert efficiency.value_at(2) == pytest.approx(0.75)
    assert efficiency.value_at(9) == 0.5


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"needs": ()}, "needs"),
        ({"needs": ONE_CORE * 2}, "each resource once"),
        ({"elastic": Elastic(GPUS, Efficiency())}, "elastic: 'gpus'"),
        ({"single_unit_s": 0.0}, "single_unit_s: 0.0"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"retries": 1, "environment": EnvironmentId("e")}, "retries: 1"),
        ({"service": ServiceName("judge")}, "service: 'judge'"),
        ({"needs": (Need(GPUS, Amounts.exactly(1)),)}, "service: "),
    ],
)
def test_a_bad_action_is_told_which_field_is_wrong(fields: dict[str, object], says: str) -> None:
    good: dict[str, object] = {
        "action": ActionId("a"),
        "job": JobId("j"),
        "kind": "pytest",
        "needs": ONE_CORE,
    }
    with pytest.raises(ConfigError, match=says):
        ActionSpec(**(good | fields))  # type: ignore[arg-type]


def test_bad_limits_services_and_capacities_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit web"):
        Limit(ResourceName("web"))
    with pytest.raises(ConfigError, match="quota: 0"):
        Limit(ResourceName("web"), quota=0)
    with pytest.raises(ConfigError, match="degrees"):
        GpuService(ServiceName("judge"), (ServiceShape(3, 1, 1.0),))
    with pytest.raises(ConfigError, match="each core once"):
        WorkerCapacity(cores=((0, 1), (1,)))


def test_an_event_survives_the_record() -> None:
    elastic = Elastic(CORES, Efficiency.amdahl(0.9, 4))
    spec = ActionSpec(
        ActionId("a"),
        JobId("j"),
        "pytest",
        (Need(CORES, Amounts.from_range(1, 4)),),
        EnvironmentId("e"),
        elastic=elastic,
        single_unit_s=3.0,
    )
    event = ActionSubmitted(1.5, spec)
    assert msgspec.json.decode(msgspec.json.encode(event), type=ActionSubmitted) == event
