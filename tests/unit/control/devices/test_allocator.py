"""The device allocator: all or nothing, one owner, one link domain where there is room."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.control.devices.allocator import DeviceAllocator
from slackwater.control.devices.messages import (
    AllocationCommand,
    AllocationEvent,
    AssignmentsRestored,
    DeploymentReleased,
    DeploymentsRequested,
    DevicesLost,
    DevicesReported,
    RefuseDeployment,
    StartDeployment,
)
from slackwater.model.device import CUDA, DeploymentRequest, Device
from slackwater.model.ids import DeploymentId, DeviceId, NodeId

A, B = NodeId("a"), NodeId("b")


def gpus(
    node: NodeId = A, count: int = 8, per_domain: int = 4, memory_mb: int = 80_000
) -> tuple[Device, ...]:
    return tuple(
        Device(
            node,
            index,
            CUDA,
            memory_mb,
            domain=str(index // per_domain),
            visible=str(index),
            hardware=f"GPU-{node}-{index}",
        )
        for index in range(count)
    )


def request(
    name: str, devices: int = 1, group: str = "", node: NodeId | None = A, memory_mb: int = 0
) -> DeploymentRequest:
    return DeploymentRequest(
        DeploymentId(name), devices, node=node, kind=CUDA, group=group, memory_mb=memory_mb
    )


class Stage:
    """An allocator whose integrity is checked after every event."""

    def __init__(self, *reports: tuple[Device, ...]) -> None:
        self.allocator = DeviceAllocator()
        for devices in reports:
            self.tell(DevicesReported(0.0, devices[0].node, devices))

    def tell(self, event: AllocationEvent) -> Sequence[AllocationCommand]:
        commands = self.allocator.handle(event)
        self.allocator.check_integrity()
        return commands

    def ask(self, *requests: DeploymentRequest) -> Sequence[AllocationCommand]:
        return self.tell(DeploymentsRequested(0.0, requests))

    def indices(self, *requests: DeploymentRequest) -> list[list[int]]:
        started = self.ask(*requests)
        assert all(isinstance(command, StartDeployment) for command in started), started
        return [
            [device.index for device in command.devices]
            for command in started
            if isinstance(command, StartDeployment)
        ]

    def reason(self, asked: DeploymentRequest) -> str:
        (command,) = self.ask(asked)
        assert isinstance(command, RefuseDeployment), command
        return command.reason


def test_deployments_get_devices_of_their_own_within_one_link_domain() -> None:
    stage = Stage(gpus())
    assert stage.indices(request("t", 2), request("e0", 4), request("e1", 1)) == [
        [0, 1],
        [4, 5, 6, 7],  # not 2, 3, 4, 5
        [2],
    ]


def test_the_fullest_domain_that_has_room_is_filled_first() -> None:
    stage = Stage(gpus())
    assert stage.indices(request("x", 3), request("y", 1), request("z", 4)) == [
        [0, 1, 2],
        [3],
        [4, 5, 6, 7],
    ]


def test_a_deployment_spans_domains_only_where_none_has_room() -> None:
    stage = Stage(gpus())
    stage.ask(request("x", 3), request("y", 3))
    assert stage.indices(request("z", 2)) == [[3, 7]]


def test_a_deployment_gets_all_devices_or_none() -> None:
    stage = Stage(gpus(count=4))
    stage.ask(request("trainer", 2))
    assert "big needs 3 cuda devices; of node a are owned" in stage.reason(request("big", 3))
    assert stage.indices(request("e0"), request("e1")) == [[2], [3]]


def test_only_deployments_that_alternate_own_one_device() -> None:
    stage = Stage(gpus(count=2))
    shared = [request("trainer", 1, "t0"), request("local-0", 1, "t0"), request("local-1", 1, "t0")]
    assert stage.indices(*shared) == [[0], [0], [0]]
    assert stage.indices(request("engine")) == [[1]]
    assert "are owned a/cuda:0 by trainer" in stage.reason(request("other", 1, "t1"))
    assert stage.allocator.owners(DeviceId("a/cuda:0")) == ["trainer", "local-0", "local-1"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("x", 9), "x needs 9 cuda devices; the most of node a is 8"),
        (request("x", 1, node=B), "x needs 1 cuda device; the most of node b is 0"),
        (request("x", 2, memory_mb=90_000), "x needs 2 cuda devices of 90000 MiB each; the"),
        (request("x", 9, node=None), "x needs 9 cuda devices; the most of any node is 8"),
    ],
)
def test_what_fits_nowhere_is_refused_with_the_reason(asked: DeploymentRequest, said: str) -> None:
    stage = Stage(gpus())
    assert said in stage.reason(asked)


def test_a_deployment_without_a_node_goes_where_there_is_least_room_for_it() -> None:
    stage = Stage(gpus(), gpus(B, 2))
    (started,) = stage.ask(request("x", 2, node=None))
    assert isinstance(started, StartDeployment)
    assert {device.node for device in started.devices} == {B}


def test_a_node_that_comes_back_has_its_deployments_on_the_same_devices() -> None:
    stage = Stage(gpus())
    stage.ask(request("e0"), request("e1"), request("t", 2))
    stage.tell(DevicesLost(1.0, A))
    assert "the most of node a is 0" in stage.reason(request("e0"))
    stage.tell(DevicesReported(2.0, A, gpus()))
    assert stage.indices(request("t", 2), request("e1")) == [[2, 3], [1]]
    assert stage.indices(request("new"), request("e0")) == [[4], [0]]  # not what e0 is to have


def test_a_device_that_disappears_is_replaced_or_its_deployment_refused() -> None:
    stage = Stage(gpus(count=3))
    stage.ask(request("e0"), request("e1"))
    stage.tell(DevicesReported(1.0, A, gpus(count=3)[1:]))
    assert stage.indices(request("e1"), request("e0")) == [[1], [2]]
    stage.tell(DevicesReported(2.0, A, gpus(count=3)[2:]))
    assert stage.indices(request("e0")) == [[2]]
    assert "of node a are owned a/cuda:2 by e0" in stage.reason(request("e1"))


def test_two_nodes_cannot_have_one_device() -> None:
    stage = Stage(gpus(count=2))
    (stolen,) = gpus(count=1)
    claimed = Device(B, 0, CUDA, hardware=stolen.hardware)
    assert stage.allocator.conflict(A, gpus(count=2)) is None
    why = stage.allocator.conflict(B, [claimed])
    assert why == (
        "node b: b/cuda:0 (GPU-a-0) is already a/cuda:0; "
        "give every node GPUs of its own with --gpu-ids"
    )
    stage.tell(DevicesReported(0.0, B, (claimed, stolen)))
    assert stage.allocator.devices(B) == ()


def test_owners_are_restored_by_another_control_plane() -> None:
    before, after = Stage(gpus()), Stage()
    before.ask(request("x", 3), request("y", 3), request("z", 2))
    after.tell(AssignmentsRestored(0.0, before.allocator.assignments()))
    after.tell(DevicesReported(0.0, A, gpus()))
    assert after.indices(request("z", 2), request("y", 3), request("x", 3)) == [
        [3, 7],
        [4, 5, 6],
        [0, 1, 2],
    ]


NAMES = st.sampled_from([f"d{number}" for number in range(6)])
NODES = st.sampled_from([A, B])
REQUESTS = st.builds(
    request,
    NAMES,
    st.integers(1, 5),
    st.sampled_from(["", "g", "h"]),
    st.sampled_from([A, B, None]),
    st.sampled_from([0, 80_000, 80_001]),
)
EVENTS = st.one_of(
    st.builds(
        lambda node, count, stolen: DevicesReported(
            0.0, node, gpus(node, count, 2) + gpus(A if node == B else B, stolen)
        ),
        NODES,
        st.integers(0, 6),
        st.integers(0, 2),
    ),
    st.builds(lambda node: DevicesLost(0.0, node), NODES),
    st.builds(
        lambda asked: DeploymentsRequested(0.0, tuple(asked)),
        st.lists(REQUESTS, max_size=4, unique_by=lambda one: one.deployment),
    ),
    st.builds(lambda name: DeploymentReleased(0.0, DeploymentId(name)), NAMES),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(EVENTS, max_size=25))
def test_no_history_gives_a_device_two_owners_or_a_deployment_a_part(
    events: list[AllocationEvent],
) -> None:
    stage = Stage()
    for event in events:
        asked = event.requests if isinstance(event, DeploymentsRequested) else ()
        before = stage.allocator.assignments()
        commands = stage.tell(event)
        assert [command.deployment for command in commands] == [one.deployment for one in asked]
        for one, command in zip(asked, commands, strict=True):
            after = stage.allocator.assignments().get(one.deployment)
            if isinstance(command, StartDeployment):
                assert after == tuple(device.device for device in command.devices)
                assert one.deployment in before or len(command.devices) == one.devices
            else:
                assert after in (None, before.get(one.deployment))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_what_fits_is_never_refused(sizes: list[int]) -> None:
    stage, free = Stage(gpus()), 8
    for number, size in enumerate(sizes):
        (command,) = stage.ask(request(f"d{number}", size))
        assert isinstance(command, StartDeployment) == (size <= free)
        free -= size if size <= free else 0
