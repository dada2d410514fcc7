"""Jobs of 1 to 64 devices on one fleet: parts of nodes, whole nodes, and no device rented twice."""

import random

import pytest

from slackwater.model.ids import JobId, NodeId
from slackwater.model.job import JobProfile, JobSpec
from slackwater.model.node import H20, H800, Pool, Role
from slackwater.model.placement import Placement, Refusal, is_within, overlap, place_devices
from slackwater.policy.placement.catalogue import POLICIES, make_policy
from slackwater.policy.placement.fleet import FleetView
from slackwater.policy.placement.interface import PlacementPolicy
from slackwater.policy.placement.rented_nodes import NodeStock

NODE = NodeId("train-0")


def fleet(rollout: int = 4, train: int = 4) -> FleetView:
    return FleetView(Pool(Role.ROLLOUT, H20, rollout), Pool(Role.TRAIN, H800, train))


def job(name: str, devices: int, where: FleetView, *, slo: float = 1.0) -> JobSpec:
    asked = JobProfile(
        *(100.0, 100.0),
        rollout_state_gb=10.0,
        train_state_gb=10.0,
        rollout_devices=devices,
        train_devices=devices,
    )
    return JobSpec(JobId(name), 0.0, 10, slo, where.with_node_counts(asked))


def placed(policy: PlacementPolicy, spec: JobSpec) -> Placement:
    answer = policy.place(spec, 0.0)
    assert isinstance(answer, Placement), answer
    policy.check_integrity()
    return answer


@pytest.mark.parametrize(
    ("devices", "least", "part"),
    [(0, 1, 8), (1, 1, 1), (2, 1, 2), (3, 1, 4), (5, 1, 8), (8, 1, 8), (64, 1, 8), (1, 2, 2)],
)
def test_a_job_has_the_smallest_equal_part_of_a_node_that_holds_it(
    devices: int, least: int, part: int
) -> None:
    assert Pool(Role.TRAIN, H800, 8, least_devices=least).part_devices(devices) == part


def test_places_overlap_where_they_have_a_device_in_common() -> None:
    low, high = NodeId("train-0/0-3"), NodeId("train-0/4-7")
    assert overlap(NODE, low) and overlap(low, NodeId("train-0/3")) and overlap(low, low)
    assert not overlap(low, high) and not overlap(low, NodeId("train-1/0-3"))
    assert is_within(NodeId("train-0/3"), low) and is_within(low, NODE)
    assert not is_within(NODE, low) and not is_within(high, low)


@pytest.mark.parametrize("seed", range(5))
def test_a_stock_never_gives_a_device_twice_and_knows_how_much_is_left(seed: int) -> None:
    draw = random.Random(seed)
    stock, held = NodeStock(Pool(Role.TRAIN, H800, 3)), list[NodeId]()
    for _ in range(300):
        part = draw.choice((1, 2, 4, 8))
        if draw.random() < 0.5 and stock.free(part):
            taken = stock.take(part)
            assert not [place for place in held if overlap(place, taken)]
            held.append(taken)
        elif held:
            stock.give_back(held.pop(draw.randrange(len(held))))
        used = [len(place_devices(place) or range(8)) for place in held]
        assert stock.used == sum(used)
        for size in (1, 2, 4, 8):
            starts = [NodeId(f"train-{n}/{i}-{i + size - 1}") for n in range(3)
                      for i in range(0, 8, size)]  # fmt: skip
            free = [one for one in starts if not any(overlap(one, place) for place in held)]
            assert stock.free(size) == len(free)
    for place in held:
        stock.give_back(place)
    assert stock.free(8) == 3 and stock.take(8) == "train-0"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_small_jobs_divide_a_node_and_a_large_one_gets_all_its_nodes_or_none(name: str) -> None:
    where = fleet()
    policy = make_policy(name, where)
    small = [placed(policy, job(f"small-{n}", 2, where)) for n in range(4)]
    parts = {node for one in small for node in one.train_nodes}
    assert parts <= {f"train-0/{n}-{n + 1}" for n in (0, 2, 4, 6)}
    large = job("large", 32, where)
    assert large.profile.train_nodes == 4
    refused = policy.place(large, 0.0)
    assert isinstance(refused, Refusal) and not refused.final
    assert policy.hourly_cost() == pytest.approx(where.rent_per_h(policy.list_rented()))
    for one in small:
        policy.remove(one.job)
        policy.check_integrity()
    assert not policy.list_rented()
    assert len(placed(policy, large).train_nodes) == 4
    assert isinstance(policy.place(job("late", 1, where), 0.0), Refusal)


def test_jobs_of_one_size_share_a_part_and_those_of_another_do_not() -> None:
    where = fleet(train=2)
    policy = make_policy("group", where)
    first, second = (placed(policy, job(name, 4, where, slo=2.0)) for name in ("a", "b"))
    other = placed(policy, job("c", 2, where, slo=2.0))
    assert first.train_nodes == second.train_nodes == ("train-0/0-3",)
    assert first.group == second.group != other.group
    assert other.train_nodes == ("train-0/4-5",)


def test_a_job_that_has_more_devices_than_the_fleet_is_refused_for_good() -> None:
    where = fleet()
    answer = make_policy("group", where).place(job("vast", 64, where), 0.0)
    assert isinstance(answer, Refusal) and answer.final
    assert "needs 8 rollout nodes (64 devices) and the pool has 4" in answer.reason
