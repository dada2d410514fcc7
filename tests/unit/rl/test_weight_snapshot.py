"""A step's sampler is asked for behind its updates, before the driver waits for their results."""

from types import SimpleNamespace
from typing import Any

import pytest

from slackwater.rl.grpo import OverlappedUpdate, WeightSnapshot
from slackwater.rl.recipe import load_recipe
from slackwater.rl.rollout import Trajectory, TrajectoryGroup
from slackwater.rl.run_directory import PromptUse


class Requests:
    """A training client that writes down what it is asked for, and when a result is read."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def _ask(self, name: str, answer: object) -> Any:
        self.made.append(name)

        def result() -> object:
            self.made.append(f"{name} read")
            return answer

        return SimpleNamespace(result=result)

    def forward_backward(self, data: Any, *_: object) -> Any:
        logprobs = [{"logprobs": datum.loss_fn_inputs["logprobs"]} for datum in data]
        passed = SimpleNamespace(metrics={"loss:sum": 1.0}, loss_fn_outputs=logprobs)
        return self._ask("pass", passed)

    def optim_step(self, _: object) -> Any:
        return self._ask("step", SimpleNamespace(metrics={}))

    def save_weights_and_get_sampling_client(self) -> str:
        self.made.append("snapshot")
        return "sampler"


def test_the_snapshot_is_asked_for_behind_the_updates_before_their_results_are_read() -> None:
    training = Requests()
    snapshot = WeightSnapshot(training)
    answers = []
    for reward in (0.0, 1.0):
        answers.append(Trajectory([1, 2]))
        answers[-1].act([3, 4], [-0.1, -0.1])
        answers[-1].reward = reward
    update = OverlappedUpdate(load_recipe("copy-digits", ["grpo.overlap=2"]), training, 4)
    update.add(TrajectoryGroup(PromptUse(0, 0), tuple(answers)))

    def queued() -> None:
        snapshot.take()
        assert snapshot.result() == "sampler"

    assert update.finish(queued)["optim/updates"] == 1.0
    assert training.made == ["pass", "step", "snapshot", "pass read", "step read"]


def test_what_breaks_the_snapshot_is_raised_where_it_is_needed() -> None:
    snapshot = WeightSnapshot(SimpleNamespace())  # it can save nothing
    snapshot.take()
    with pytest.raises(AttributeError, match="save_weights"):
        snapshot.result()
