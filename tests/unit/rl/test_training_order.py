"""Micro-batches that train while the rest roll out are the same whichever group ends first."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from slackwater.rl.grpo import OverlappedUpdate, SampledGroups, _sample_groups
from slackwater.rl.recipe import Recipe, load_recipe
from slackwater.rl.rollout import Rollout, Trajectory, TrajectoryGroup
from slackwater.rl.run_directory import PromptUse

GROUPS = 6


def group(use: PromptUse) -> TrajectoryGroup:
    """Two answers of some length; those to every third prompt are equally good and not kept."""
    answers = []
    for number in range(2):
        answers.append(Trajectory([use.prompt, 2]))
        length = 1 + (use.prompt + number) % 4
        answers[-1].act([3] * length, [-0.1 - use.prompt / 7] * length)
        answers[-1].reward = float(number * (use.prompt % 3))
    return TrajectoryGroup(use, tuple(answers))


class Arrivals:
    """A rollout whose groups become complete in an order of their own."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self.yielded: list[PromptUse] = []

    def iter_groups(self, uses: list[PromptUse], size: int) -> Iterator[TrajectoryGroup]:
        del size
        for index in (number for number in self._order if number < len(uses)):
            self.yielded.append(uses[index])
            yield group(uses[index])


class Passes:
    """A training client that writes down each pass, and how many groups had ended by then."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.made: list[list[dict[str, Any]]] = []
        self.begun_after: list[int] = []
        self._arrivals = arrivals

    def forward_backward(self, data: Any, *_: object) -> Any:
        self.begun_after.append(len(self._arrivals.yielded))
        self.made.append([_plain(datum) for datum in data])
        return SimpleNamespace(result=lambda: None)


def _plain(datum: Any) -> dict[str, Any]:
    inputs = {name: list(row.data) for name, row in datum.loss_fn_inputs.items()}
    return {"tokens": datum.model_input.to_ints(), **inputs}


def recipe(in_order: bool) -> Recipe:
    changes = ["grpo.group_size=2", "grpo.overlap=4", "grpo.dynamic_sampling=true"]
    changes += [f"grpo.groups={GROUPS}", f"grpo.max_groups={3 * GROUPS}"]
    return load_recipe("copy-digits", [*changes, f"grpo.in_order={str(in_order).lower()}"])


def sample(order: list[int], *, in_order: bool = True) -> tuple[Passes, SampledGroups]:
    arrivals = Arrivals(order)
    passes = Passes(arrivals)
    settings = recipe(in_order)
    update = OverlappedUpdate(settings, passes, 100)
    return passes, _sample_groups(settings, cast(Rollout, arrivals), 0, update.add)


@given(st.permutations(range(GROUPS)))
def test_passes_are_equal_bit_for_bit_whichever_group_ends_first(order: list[int]) -> None:
    expected, sampled = sample(list(range(GROUPS)))
    found, again = sample(order)
    assert found.made == expected.made
    assert again == sampled
    kept = [len(made) for made in found.made]
    assert all(count >= 4 for count in kept) and len(sampled.kept) >= GROUPS


def test_training_begins_once_the_earliest_prompts_are_complete() -> None:
    early, _ = sample(list(range(GROUPS)))
    assert early.begun_after[0] < GROUPS, "before the rest are complete"
    late, _ = sample([1, 2, 3, 4, 5, 0])
    assert late.begun_after[0] == GROUPS, "the first prompt is the slowest"
    by_arrival, _ = sample([1, 2, 3, 4, 5, 0], in_order=False)
    assert by_arrival.begun_after[0] < GROUPS
    assert by_arrival.made != late.made
