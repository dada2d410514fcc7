"""States that overlap: whatever phases name an object, in whatever order and container, its bits
are its own.
"""

import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slackwater
from harness.phase_job import leave_job
from slackwater.phases.residency import residency, tensors_of


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SLACKWATER_OFFLINE", "1")
    monkeypatch.delenv("SLACKWATER_URL", raising=False)
    yield
    leave_job()


def net() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
    )


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_rolls_out_and_is_trained_with_its_optimizer() -> None:
    model, alone = net(), net()
    alone.load_state_dict(model.state_dict())
    optimizer, beside = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, alone))

    @slackwater.phase("rollout", state=[model])
    def rollout() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.ones(4, 8))
            return found

    @slackwater.phase("train", state=lambda: {"model": model, "optimizer": optimizer})
    def train() -> None:
        step(model, optimizer)

    for _ in range(4):
        with torch.no_grad():
            expected = alone(torch.ones(4, 8))
        assert torch.equal(rollout(), expected)
        assert not any(t.numel() for t in tensors_of([model, optimizer]) if t.dim())
        train()
        step(alone, beside)


def test_a_phase_inside_itself_wakes_what_only_the_inner_one_names() -> None:
    first, second = torch.arange(4.0), torch.arange(6.0)
    inner = slackwater.phase("train", state=[first, second])
    with inner:
        pass
    assert first.numel() == second.numel() == 0
    with slackwater.phase("train", state=[first]):
        assert first.numel() == 4
        with inner:
            assert second.tolist() == list(range(6))
        assert second.numel() == 6, "the phase goes on"
    assert first.numel() == second.numel() == 0


def test_a_rollout_wakes_the_model_and_not_the_moments() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with slackwater.phase("train", state=[model, optimizer]):
        step(model, optimizer)
    for _ in range(2):  # the first tells the two apart
        with slackwater.phase("rollout", state=[model]):
            awake = [t.numel() for t in tensors_of([optimizer]) if t.numel()]
    assert awake == []


def test_data_that_was_replaced_during_a_phase_is_what_comes_back() -> None:
    tensor = torch.zeros(3)
    with slackwater.phase("train", state=[tensor]):
        pass
    with slackwater.phase("train", state=[tensor]):
        tensor.data = torch.arange(5.0)
    with slackwater.phase("train", state=[tensor]):
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_tensors_that_the_program_dropped_are_not_kept() -> None:
    for _ in range(3):
        made = torch.ones(1000)
        with slackwater.phase("train", state=[made]):
            pass
    del made
    gc.collect()
    with slackwater.phase("train", state=[torch.ones(2)]):
        pass
    assert len(residency()._groups) <= 2


class Shadow:
    """Tensors, and what each of them must be."""

    def __init__(self) -> None:
        self.model = net()
        self.things: dict[str, Any] = {
            "model": self.model,
            "layer": self.model[0],
            "weight": self.model[2].weight,
            "tensor": torch.arange(5.0),
            "wide": torch.arange(3, dtype=torch.float64),
            "pair": [torch.ones(2), torch.zeros(7)],
        }
        everything = list(tensors_of(self.things.values()))
        self.bits = {id(t): (t, t.detach().clone()) for t in everything}

    def check_and_change(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            _, expected = self.bits[id(tensor)]
            assert torch.equal(tensor.detach(), expected)
            with torch.no_grad():
                tensor.add_(1)
            expected.add_(1)

    def check_asleep(self, known: set[int]) -> None:
        assert all(self.bits[number][0].numel() == 0 for number in known)


def contained(things: list[Any], how: int) -> Any:
    """The same things, in one container or another."""
    kinds: list[Callable[[], Any]] = [
        lambda: things,
        lambda: tuple(things),
        lambda: {str(number): thing for number, thing in enumerate(things)},
        lambda: (thing for thing in things),
        lambda: [things, things[:1]],
        lambda: lambda: list(things),
        lambda: lambda: (thing for thing in things),
        lambda: [iter(things)],
    ]
    return kinds[how % len(kinds)]()


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_any_overlap_in_any_order_and_container_keeps_every_bit(seed: int) -> None:
    draw, shadow = random.Random(seed), Shadow()
    known: set[int] = set()

    def enter(phase: str, depth: int) -> None:
        names = draw.choices(list(shadow.things), k=draw.randrange(1, 4))
        things = [shadow.things[name] for name in names]
        tensors = list(tensors_of(things))
        with slackwater.phase(phase, state=contained(things, draw.randrange(8))):
            known.update(id(t) for t in tensors)
            shadow.check_and_change(tensors)
            if depth and draw.random() < 0.3:
                enter(phase, depth - 1)
                shadow.check_and_change(tensors)

    for _ in range(6):
        enter(draw.choice(["rollout", "train", "sync"]), 2)
        shadow.check_asleep(known)
