"""Precedence: an action that computes on and on comes after everything else, and never starves."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_stage import Stage

from slackwater.sandbox.cgroups import CgroupFence
from slackwater.sandbox.fences import Precedence
from slackwater.sandbox.running_action import pick_precedence

_SECONDS = st.floats(0, 1e6)


@given(_SECONDS, _SECONDS, _SECONDS)
def test_only_what_had_a_fair_part_of_a_core_comes_last(
    used_s: float, lately_s: float, elapsed_s: float
) -> None:
    found = pick_precedence(used_s, lately_s, elapsed_s)
    assert (found is Precedence.EQUAL) == (used_s <= 0.05)
    if found is Precedence.LAST:
        assert lately_s >= elapsed_s / 4
    if found is Precedence.LOW:
        assert lately_s < elapsed_s / 4


@pytest.fixture
def lanes(stage: Stage) -> Iterator[Stage]:
    """A stage whose fences can tell who comes last."""
    assert stage.sh("true").over.status == 0
    fences = stage.platform.fences
    made = list(getattr(fences, "_lanes", []))
    if not made or made[0]._cpu is None:
        pytest.skip("no control group with cpu.idle can be written to here")
    yield stage


def _fence(stage: Stage, action: str) -> CgroupFence:
    fence = stage.supervisor._running[action].fence
    assert isinstance(fence, CgroupFence)
    return fence


def _is_last(fence: CgroupFence) -> bool:
    assert fence._cpu is not None
    return (fence._cpu / "cpu.idle").read_text().strip() == "1"


def test_an_action_that_computes_comes_last_and_ends_like_any_other(lanes: Stage) -> None:
    action = lanes.start("/bin/sh", "-c", "while :; do :; done")
    fence = _fence(lanes, action)
    assert not _is_last(fence)
    lanes.step_until(lambda: _is_last(fence))
    lanes.supervisor.stop(action, "enough")
    assert lanes.until_over(action).over.reason == "enough"
    assert not _is_last(fence)


def test_an_action_that_sleeps_keeps_its_precedence(lanes: Stage) -> None:
    spinning = lanes.start("/bin/sh", "-c", "while :; do :; done")
    sleeping = lanes.start("sleep", "600")
    lanes.step_until(lambda: _is_last(_fence(lanes, spinning)))
    assert not _is_last(_fence(lanes, sleeping))
    for action in (spinning, sleeping):
        lanes.supervisor.stop(action, "enough")
        lanes.until_over(action)
