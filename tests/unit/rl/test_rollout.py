"""Groups through a sampling client that answers out of order."""

import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from slackwater.rl.environments.guess_number import GuessNumber
from slackwater.rl.recipe import SamplingSettings
from slackwater.rl.rollout import Rollout, TrajectoryGroup
from slackwater.rl.run_directory import PromptOrder
from slackwater.rl.text import Observation, PlainText

END = 258


@dataclass
class Sequence:
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Response:
    sequences: list[Sequence]


class ShuffledSampler:
    """Answers requests from its own thread in a random order; an answer depends on the request's
    seed only.
    """

    def __init__(self, order_seed: int) -> None:
        self._order = random.Random(order_seed)
        self.seeds: list[int] = []

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Future[Response]:
        self.seeds.append(sampling_params.seed)
        draw = random.Random(sampling_params.seed)
        answers = [str(draw.randint(1, 8)) for _ in range(num_samples)]
        response = Response([Sequence([*a.encode(), END], [-1.0, -0.5]) for a in answers])
        future: Future[Response] = Future()
        delay_s = self._order.random() * 0.01
        threading.Timer(delay_s, future.set_result, [response]).start()
        return future


class Bytes(PlainText):
    def __init__(self) -> None:
        self.stop = (END,)

    def first(self, observation: Observation) -> list[int]:
        assert isinstance(observation, str)
        return list(observation.encode())

    def next(self, observation: str, ended: bool) -> list[int]:
        assert ended
        return list(observation.encode())

    def answer(self, tokens: Any) -> str:
        return bytes(t for t in tokens if t != END).decode()

    def encode_answer(self, text: str) -> list[int]:
        return [*text.encode(), END]


def sampled(order_seed: int) -> tuple[list[TrajectoryGroup], ShuffledSampler]:
    sampler = ShuffledSampler(order_seed)
    rollout = Rollout(sampler, GuessNumber(), Bytes(), SamplingSettings(), seed=3)
    return rollout.groups(PromptOrder(20, 0).uses(0, 5), size=4), sampler


def test_what_is_sampled_does_not_depend_on_which_answer_came_first() -> None:
    (one, _), (other, _) = sampled(1), sampled(2)
    assert [group.use for group in one] == [group.use for group in other]
    for first, second in zip(one, other, strict=True):
        assert [t.tokens for t in first.trajectories] == [t.tokens for t in second.trajectories]
        assert first.rewards == second.rewards


def test_every_trajectory_is_played_to_its_end_and_no_seed_is_used_twice() -> None:
    groups, sampler = sampled(3)
    assert len(sampler.seeds) == len(set(sampler.seeds))
    for group in groups:
        assert len(group.trajectories) == 4
        for trajectory in group.trajectories:
            transcript = bytes(t for t in trajectory.tokens if t != END).decode()
            found = trajectory.reward >= 0.25
            assert found or trajectory.turns == 4
            assert transcript.startswith("1-8?")
            assert sum(trajectory.sampled) == 2 * trajectory.turns


def test_an_error_of_the_service_reaches_the_caller() -> None:
    class Failing(ShuffledSampler):
        def sample(self, *_: Any, **__: Any) -> Future[Response]:
            future: Future[Response] = Future()
            future.set_exception(ConnectionError("gone"))
            return future

    rollout = Rollout(Failing(0), GuessNumber(), Bytes(), SamplingSettings(), seed=0)
    with pytest.raises(ConnectionError, match="gone"):
        rollout.groups(PromptOrder(20, 0).uses(0, 2), size=2)


class Slow:
    """GuessNumber, whose replies come later and from another thread."""

    prompts = 2000

    def __init__(self, seed: int) -> None:
        self._order = random.Random(seed)

    def episode(self, prompt: int) -> Any:
        inner, delays = GuessNumber().episode(prompt), self._order

        class Later:
            first_observation = inner.first_observation

            def answer(self, text: str) -> Future[Any]:
                future: Future[Any] = Future()
                reply = inner.answer(text)
                threading.Timer(delays.random() * 0.01, future.set_result, [reply]).start()
                return future

        return Later()

    def demonstration(self, prompt: int) -> tuple[tuple[str, str], ...]:
        return GuessNumber().demonstration(prompt)


def test_replies_that_come_later_lead_to_the_same_trajectories() -> None:
    uses = PromptOrder(20, 0).uses(0, 5)
    at_once = Rollout(ShuffledSampler(0), GuessNumber(), Bytes(), SamplingSettings(), seed=0)
    later = Rollout(ShuffledSampler(1), Slow(2), Bytes(), SamplingSettings(), seed=0)
    for one, other in zip(at_once.groups(uses, 4), later.groups(uses, 4), strict=True):
        assert one.rewards == other.rewards
        assert [t.tokens for t in one.trajectories] == [t.tokens for t in other.trajectories]
