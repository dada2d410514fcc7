"""Who starts with how much: exact sharing, never over what is free, and eviction only where it
pays.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.actions.simulated.arrange import arrange
from benchmarks.actions.simulated.baselines import FixedDegree, LeastEach, count_fitting
from benchmarks.actions.simulated.elastic import ElasticScheduling
from benchmarks.actions.simulated.eviction import hand_out
from slackwater.model.amounts import Amounts, Efficiency
from slackwater.policy.actions.curve import DurationCurve, make_curve
from slackwater.policy.actions.scheduling import SchedulingView
from slackwater.policy.actions.topology import Topology, make_chunk_topology, make_unit_topology


def elastic(seconds: float, most: int = 8, parallel: float = 1.0) -> DurationCurve:
    return make_curve(Amounts.from_range(1, most), Efficiency.amdahl(parallel, most), seconds, 1.0)


def plain(seconds: float) -> DurationCurve:
    return make_curve(Amounts.exactly(1), None, seconds, 1.0)


def view(
    topology: Topology,
    free: int,
    candidates: list[DurationCurve],
    rest: list[DurationCurve] | None = None,
    left: list[tuple[float, int]] | None = None,
) -> SchedulingView:
    ends = sorted(left or [])
    return SchedulingView(
        topology,
        free,
        candidates,
        rest or [],
        np.array([end for end, _ in ends], dtype=np.float64),
        np.array([freed for _, freed in ends], dtype=np.int64),
    )


curve_lists = st.lists(
    st.builds(elastic, st.floats(0.1, 100), st.integers(1, 8), st.floats(0, 1)),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(curve_lists, st.integers(0, 20))
def test_handing_out_unit_by_unit_is_as_good_as_the_dynamic_program(
    curves: list[DurationCurve], spare: int
) -> None:
    rows = np.full((len(curves), 9), np.inf)
    for row, curve in zip(rows, curves, strict=True):
        row[: len(curve.seconds)] = curve.seconds
    amounts = np.ones(len(curves), dtype=np.int64)
    left = hand_out(rows, len(curves), spare, amounts)
    assert amounts.sum() + left == len(curves) + spare
    exact = arrange(make_unit_topology(len(curves) + spare, 8), rows)
    assert exact is not None
    assert sum(rows[i, a] for i, a in enumerate(amounts)) == pytest.approx(exact[0])


@settings(max_examples=100, deadline=None)
@given(
    curve_lists,
    st.lists(st.builds(plain, st.floats(0.01, 10)), max_size=4),
    curve_lists,
    st.integers(0, 30),
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 8)), max_size=8),
)
def test_grants_fit_and_the_first_always_starts(
    first: list[DurationCurve],
    others: list[DurationCurve],
    rest: list[DurationCurve],
    extra: int,
    left: list[tuple[float, int]],
) -> None:
    candidates = [first[0], *others, *first[1:]]
    free = len(candidates) + extra
    amounts = ElasticScheduling().decide(
        view(make_unit_topology(free, 8), free, candidates, rest, left)
    )
    assert sum(amounts) <= free
    for curve, amount in zip(candidates, amounts, strict=True):
        assert amount == 0 or amount in curve.choices
    assert amounts[0] > 0
    assert all(amounts[1 : 1 + len(others)])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=5),
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
)
def test_chunks_of_gpus_are_shared_within_their_topology(
    seconds: list[float], free: tuple[int, int, int, int]
) -> None:
    topology = make_chunk_topology(free)
    curves = [
        make_curve(Amounts.from_choices(1, 2, 4, 8), Efficiency.amdahl(0.95, 8), each, 1.0)
        for each in seconds
    ]
    fitting = count_fitting(topology, [1] * len(curves))
    total = sum(count << level for level, count in enumerate(free))
    amounts = ElasticScheduling().decide(view(topology, total, curves[:fitting], curves[fitting:]))
    started = [amount for amount in amounts if amount]
    assert count_fitting(topology, started) == len(started)
    assert all(amount in (1, 2, 4, 8) for amount in started)


def test_a_lone_action_gets_all_that_helps_it() -> None:
    assert ElasticScheduling().decide(view(make_unit_topology(32, 8), 32, [elastic(10.0)])) == [8]


def test_two_alike_share_alike() -> None:
    assert ElasticScheduling().decide(
        view(make_unit_topology(8, 8), 8, [elastic(10.0), elastic(10.0)])
    ) == [
        4,
        4,
    ]


def test_the_last_is_put_off_where_that_shortens_the_sum() -> None:
    # Perfect speed-up: one after the other on both cores beats side by side on one each.
    curves = [elastic(10.0, 2), elastic(10.0, 2)]
    assert ElasticScheduling().decide(view(make_unit_topology(2, 2), 2, curves)) == [2, 0]
    # What does not scale gains nothing from waiting.
    serial = [elastic(10.0, 2, 0.1), elastic(10.0, 2, 0.1)]
    assert ElasticScheduling().decide(view(make_unit_topology(2, 2), 2, serial)) == [1, 1]


def test_an_action_of_unknown_length_gets_its_least() -> None:
    unknown = make_curve(Amounts.from_range(1, 8), Efficiency.amdahl(1.0, 8), None, 5.0)
    assert ElasticScheduling().decide(view(make_unit_topology(8, 8), 8, [unknown])) == [1]


def test_rules_without_elasticity() -> None:
    seen = view(
        make_unit_topology(10, 8), 10, [elastic(1.0), plain(1.0), elastic(1.0), elastic(1.0)]
    )
    assert LeastEach().decide(seen) == [1, 1, 1, 1]
    assert FixedDegree(4).decide(seen) == [4, 1, 4, 0]
