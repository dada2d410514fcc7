"""Each prompt exactly once per epoch, however the uses are cut into steps."""

from hypothesis import given
from hypothesis import strategies as st

from slackwater.rl.run_directory import PromptOrder, PromptUse


@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.integers(1, 17), max_size=20))
def test_any_cut_into_steps_uses_the_same_prompts_in_the_same_order(
    prompts: int, seed: int, steps: list[int]
) -> None:
    order = PromptOrder(prompts, seed)
    in_steps: list[PromptUse] = []
    used = 0
    for count in steps:
        in_steps.extend(order.uses(used, count))
        used += count
    assert tuple(in_steps) == order.uses(0, used)


@given(st.integers(1, 40), st.integers(0, 5))
def test_an_epoch_uses_every_prompt_once(prompts: int, seed: int) -> None:
    uses = PromptOrder(prompts, seed).uses(0, 3 * prompts)
    for epoch in range(3):
        assert sorted(use.prompt for use in uses if use.epoch == epoch) == list(range(prompts))


def test_epochs_and_seeds_differ_in_their_order() -> None:
    first = [use.prompt for use in PromptOrder(50, 0).uses(0, 100)]
    assert first[:50] != first[50:]
    assert first[:50] != [use.prompt for use in PromptOrder(50, 1).uses(0, 50)]
