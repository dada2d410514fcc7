"""Groups of trajectories through a sampling client, each turn sent as soon as the one before it has ended."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import tinker

from slackwater.rl.environments.episode import Environment, Episode
from slackwater.rl.prompt_order import PromptUse
from slackwater.rl.recipe import SamplingSettings
from slackwater.rl.text import Text
from slackwater.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Group:
    """The trajectories of one use of one prompt."""

    use: PromptUse
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]


@dataclass(slots=True)
class _Member:
    """One trajectory under way."""

    number: int
    episode: Episode
    trajectory: Trajectory


class Rollout:
    """Samples groups from one snapshot of the weights.

    Every request has a seed of its own made from the run's seed, the prompt's use, the member and the turn, so
    that what is sampled does not depend on which answer came first.
    """

    def __init__(
        self,
        sampler: Any,
        environment: Environment,
        text: Text,
        settings: SamplingSettings,
        seed: int,
    ) -> None:
        self._sampler = sampler
        self._environment = environment
        self._text = text
        self._settings = settings
        self._seed = seed

    def groups(self, uses: Sequence[PromptUse], size: int) -> list[Group]:
        """A group of `size` trajectories for each use, in the order of the uses."""
        found = {group.use: group for group in self.completed(uses, size)}
        return [found[use] for use in uses]

    def completed(self, uses: Sequence[PromptUse], size: int) -> Iterator[Group]:
        """The same groups, each as soon as it is whole; the others go on meanwhile."""
        open_turns: dict[Future[Any], tuple[int, list[_Member]]] = {}
        ended: SimpleQueue[Future[Any]] = SimpleQueue()
        members: list[list[_Member]] = []

        def send(place: int, asked: list[_Member]) -> None:
            future = self._sample(uses[place], asked[0], num_samples=len(asked))
            open_turns[future] = (place, asked)
            future.add_done_callback(ended.put)

        unfinished = [size] * len(uses)
        for place, use in enumerate(uses):
            members.append([self._start(use.prompt, number) for number in range(size)])
            send(place, members[place])
        while open_turns:
            future = ended.get()
            place, asked = open_turns.pop(future)
            going_on = self._answered(asked, future.result().sequences)
            for member in going_on:
                send(place, [member])
            unfinished[place] -= len(asked) - len(going_on)
            if unfinished[place] == 0:
                yield Group(uses[place], tuple(m.trajectory for m in members[place]))

    def _start(self, prompt: int, number: int) -> _Member:
        episode = self._environment.episode(prompt)
        return _Member(number, episode, Trajectory(self._text.first(episode.first_observation)))

    def _answered(self, asked: list[_Member], sequences: Iterable[Any]) -> list[_Member]:
        """Hand each answer to its episode; those that go on come back."""
        going_on = []
        for member, sequence in zip(asked, sequences, strict=True):
            tokens = list(sequence.tokens)
            member.trajectory.act(tokens, list(sequence.logprobs))
            reply = member.episode.answer(self._text.answer(tokens))
            member.trajectory.reward += reply.reward
            if not reply.done:
                ended = bool(tokens) and tokens[-1] in self._text.stop
                member.trajectory.observe(self._text.next(reply.observation, ended))
                going_on.append(member)
        return going_on

    def _sample(self, use: PromptUse, member: _Member, num_samples: int) -> Future[Any]:
        path = [self._seed, use.epoch, use.prompt, member.number, member.trajectory.turns]
        seed = int(np.random.SeedSequence(path).generate_state(1)[0] >> 1)
        params = tinker.SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            stop=list(self._text.stop),
            seed=seed,
        )
        prompt = tinker.ModelInput.from_ints(list(member.trajectory.tokens))
        future: Future[Any] = self._sampler.sample(
            prompt=prompt, num_samples=num_samples, sampling_params=params
        )
        return future
