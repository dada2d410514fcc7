"""Versions over links in virtual time: what the director's choices are worth."""

import pytest

from benchmarks.weights.simulated.links import Flow, Links
from benchmarks.weights.simulated.sync import LinkScenario, SyncReport, WeightWorld

GB = 1e9
SLOW, FAST = 2.5 * GB, 50 * GB  # 20 Gb/s between clusters, 400 Gb/s within


def report(**fields: object) -> SyncReport:
    base = {"model_bytes": 16 * GB, "slow": SLOW, "fast": FAST, "nodes": 4}
    return WeightWorld(LinkScenario(**(base | fields))).run()  # type: ignore[arg-type]


def test_flows_share_a_link_fairly_and_use_what_others_leave() -> None:
    links = Links({"a": 10.0, "b": 4.0})
    links.flows = [Flow(100.0, ("a",)), Flow(100.0, ("a", "b")), Flow(100.0, ("b",))]
    assert links.next_s() is not None
    assert [flow.rate for flow in links.flows] == [8.0, 2.0, 2.0]


def test_who_follows_does_not_overtake() -> None:
    links = Links({"slow": 1.0, "fast": 10.0})
    first = Flow(10.0, ("slow",), done=5.0)
    links.flows = [first, Flow(10.0, ("fast",), after=first)]
    next_s = links.next_s()
    assert next_s is not None and next_s == pytest.approx(5.0 / 9.0)
    links.advance(next_s)
    links.next_s()
    assert links.flows[1].rate == pytest.approx(1.0)


def test_flat_takes_as_many_copies_as_engines_and_a_relay_takes_one() -> None:
    flat = report(engines_per_node=2, flat=True)
    one_copy = report(engines_per_node=2)
    assert flat.crossed_bytes == pytest.approx(8 * 16 * GB, rel=1e-6)
    assert one_copy.crossed_bytes == pytest.approx(16 * GB, rel=1e-6)
    assert flat.sync_s / one_copy.sync_s > 6


def test_a_neighbour_passes_on_what_it_is_still_receiving() -> None:
    alone, four = report(nodes=1), report(nodes=8)
    assert four.sync_s < 1.1 * alone.sync_s


def test_deltas_cross_in_place_of_wholes_once_an_engine_has_one() -> None:
    found = report(delta_bytes=0.0119 * 16 * GB)
    assert found.by_delta == 2 * 4
    assert found.crossed_bytes == pytest.approx(0.0119 * 16 * GB, rel=1e-6)
    assert report().sync_s / found.sync_s > 20


def test_newcomers_pull_at_once_from_their_neighbours() -> None:
    found = report(join_s=(30.0, 60.0))
    assert found.crossed_bytes == pytest.approx(16 * GB, rel=1e-6)
    assert len(found.newcomer_s) == 2 and max(found.newcomer_s) < 2.0
