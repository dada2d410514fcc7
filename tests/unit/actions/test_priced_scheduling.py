"""Every unit has its price: few take much when nobody waits, all take less when many do, and
waiting for more must pay.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.actions.simulated.baselines import count_fitting
from slackwater.model.amounts import Amounts, Efficiency
from slackwater.policy.actions.curve import DurationCurve, make_curve
from slackwater.policy.actions.load import ElasticLoad, LoadAverage
from slackwater.policy.actions.priced import PricedScheduling
from slackwater.policy.actions.scheduling import SchedulingView
from slackwater.policy.actions.topology import Topology, make_chunk_topology, make_unit_topology


def elastic(seconds: float, most: int = 32, parallel: float = 0.98) -> DurationCurve:
    return make_curve(Amounts.from_range(1, most), Efficiency.amdahl(parallel, most), seconds, 1.0)


def view(
    topology: Topology,
    free: int,
    candidates: list[DurationCurve],
    *,
    behind: int = 0,
    left: list[tuple[float, int]] | None = None,
    patience_s: float = 1e9,
    short: LoadAverage | None = None,
) -> SchedulingView:
    ends = sorted(left or [])
    return SchedulingView(
        topology,
        free,
        candidates,
        [],
        np.array([end for end, _ in ends], dtype=np.float64),
        np.array([freed for _, freed in ends], dtype=np.int64),
        256,
        behind,
        0.0,
        short,
        [patience_s] * len(candidates),
    )


def test_nobody_waits_and_one_takes_all_that_helps() -> None:
    assert PricedScheduling().decide(view(make_unit_topology(256, 32), 256, [elastic(60.0)])) == [
        32
    ]


def test_the_more_wait_behind_it_the_less_an_action_takes() -> None:
    taken = [
        PricedScheduling().decide(
            view(make_unit_topology(256, 32), 256, [elastic(60.0)], behind=behind)
        )[0]
        for behind in (0, 30, 100, 1000)
    ]
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < taken[0]


def test_an_action_waits_for_units_that_come_soon_and_not_for_late_ones() -> None:
    one_free = make_unit_topology(1, 32)
    soon = view(one_free, 1, [elastic(60.0)], left=[(0.5, 16)])
    late = view(one_free, 1, [elastic(60.0)], left=[(500.0, 16)])
    assert PricedScheduling().decide(soon) == [0]
    assert PricedScheduling().decide(late) == [1]


def test_an_action_is_not_put_off_beyond_its_patience() -> None:
    overdue = view(make_unit_topology(1, 32), 1, [elastic(60.0)], left=[(0.5, 16)], patience_s=0.0)
    assert PricedScheduling().decide(overdue) == [1]


def test_cores_are_left_for_the_tool_calls_to_come() -> None:
    short = LoadAverage(memory_s=10.0)
    short.change(4, 0.0)
    short.change(-4, 100.0)  # four were busy for long, none is at this moment
    seen = view(make_unit_topology(8, 32), 8, [elastic(60.0)], short=short)
    assert PricedScheduling().decide(seen) == [4]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(2, 8)), min_size=1, max_size=8),
    st.integers(0, 12),
    st.integers(0, 500),
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 8)), max_size=8),
    st.sampled_from([0.0, 1e9]),
)
def test_grants_fit_what_is_free(
    work: list[tuple[float, int]],
    free: int,
    behind: int,
    left: list[tuple[float, int]],
    patience_s: float,
) -> None:
    curves = [elastic(seconds, most) for seconds, most in work]
    seen = view(
        make_unit_topology(free, 8), free, curves, behind=behind, left=left, patience_s=patience_s
    )
    amounts = PricedScheduling().decide(seen)
    assert sum(amounts) <= free
    for curve, amount in zip(curves, amounts, strict=True):
        assert amount == 0 or amount in curve.choices
    if free and not patience_s:
        assert amounts[0] > 0, "the first is overdue and must start"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=6),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)
def test_chunks_fit_their_topology(seconds: list[float], free: tuple[int, int, int, int]) -> None:
    topology = make_chunk_topology(free)
    shape = Efficiency(((1, 1.0), (2, 0.9), (4, 0.8), (8, 0.65)))
    curves = [make_curve(Amounts.from_choices(1, 2, 4, 8), shape, each, 1.0) for each in seconds]
    total = sum(count << level for level, count in enumerate(free))
    started = [units for units in PricedScheduling().decide(view(topology, total, curves)) if units]
    assert count_fitting(topology, started) == len(started)


def test_load_is_forgotten_with_time() -> None:
    load = ElasticLoad(memory_s=10.0)
    for second in range(30):
        load.record_arrival(5.0, float(second))
    busy = load.expect_arrivals(100.0, 10, 30.0)
    assert busy > 5
    assert load.expect_arrivals(100.0, 10, 300.0) < 0.01 * busy
