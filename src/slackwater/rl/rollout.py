"""Samples groups of trajectories; each turn is sent as soon as the previous one has ended."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker

from slackwater.rl.advantages import Floats
from slackwater.rl.environments.episode import EnvironmentReply, Episode, EpisodeEnvironment
from slackwater.rl.recipe import SamplingSettings
from slackwater.rl.run_directory import PromptUse
from slackwater.rl.text import PlainText


@dataclass(slots=True)
class Trajectory:
    """All turns in one token sequence; `sampled` marks the model's tokens, with log-probs."""

    tokens: list[int]
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0

    def __post_init__(self) -> None:
        self._mark_observed(len(self.tokens))

    def observe(self, tokens: list[int]) -> None:
        self.tokens.extend(tokens)
        self._mark_observed(len(tokens))

    def act(self, tokens: list[int], logprobs: list[float]) -> None:
        self.tokens.extend(tokens)
        self.sampled.extend([True] * len(tokens))
        self.logprobs.extend(logprobs)
        self.turns += 1

    def _mark_observed(self, count: int) -> None:
        self.sampled.extend([False] * count)
        self.logprobs.extend([0.0] * count)

    @property
    def sampled_logprobs(self) -> Floats:
        """Log-probs of the sampled tokens only."""
        sampled: Floats = np.asarray(self.logprobs, np.float32)[np.asarray(self.sampled)]
        return sampled

    def policy_datum(self, advantages: Floats) -> tinker.Datum:
        """A datum for a policy loss, with `advantages` of the sampled tokens and 0 elsewhere."""
        mask = np.asarray(self.sampled)
        token_advantages = np.zeros(len(self.tokens), np.float32)
        token_advantages[mask] = advantages
        return self._datum(
            logprobs=np.asarray(self.logprobs, np.float32)[1:], advantages=token_advantages[1:]
        )

    def cross_entropy_datum(self, weight: float) -> tinker.Datum:
        """A datum for cross-entropy; each sampled token has this weight."""
        return self._datum(weights=np.asarray(self.sampled[1:], np.float32) * weight)

    def _datum(self, **inputs: Floats) -> tinker.Datum:
        targets = np.asarray(self.tokens[1:], np.int64)
        arrays: dict[str, npt.NDArray[Any]] = {"target_tokens": targets, **inputs}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(self.tokens[:-1]),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(array) for name, array in arrays.items()
            },
        )


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The trajectories of one use of one prompt."""

    use: PromptUse
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    def select(self, indices: Sequence[int]) -> "TrajectoryGroup":
        """The group with only these trajectories."""
        return TrajectoryGroup(self.use, tuple(self.trajectories[index] for index in indices))

    of = select  # the earlier name, for recipes outside this package


@dataclass(slots=True)
class GroupMember:
    """One running trajectory; `ended` if its last answer had its end token."""

    number: int
    episode: Episode
    trajectory: Trajectory
    ended: bool = False


@dataclass(eq=False)
class Rollout:
    """Samples groups from one snapshot of the weights.

    Every request's seed derives from the run's seed, the prompt's use, the member and the turn, so
    that samples do not depend on the order of answers.
    """

    sampler: Any
    environment: EpisodeEnvironment
    text: PlainText
    settings: SamplingSettings
    seed: int

    def groups(self, uses: Sequence[PromptUse], size: int) -> list[TrajectoryGroup]:
        """A group of `size` trajectories for each use, in the order of the uses."""
        groups_by_use = {group.use: group for group in self.iter_groups(uses, size)}
        return [groups_by_use[use] for use in uses]

    def iter_groups(self, uses: Sequence[PromptUse], size: int) -> Iterator[TrajectoryGroup]:
        """Yield each group as soon as it is complete, while the others continue."""
        open_turns: dict[Future[Any], tuple[int, list[GroupMember]]] = {}
        open_replies: dict[Future[EnvironmentReply], tuple[int, GroupMember]] = {}
        done_futures: SimpleQueue[Future[Any]] = SimpleQueue()
        members: list[list[GroupMember]] = []
        unfinished = [size] * len(uses)

        def send(index: int, members_of_turn: list[GroupMember]) -> None:
            future = self.sample(uses[index], members_of_turn[0], num_samples=len(members_of_turn))
            open_turns[future] = (index, members_of_turn)
            future.add_done_callback(done_futures.put)

        def handle_reply(index: int, member: GroupMember, reply: EnvironmentReply) -> None:
            if self.apply_reply(member, reply):
                unfinished[index] -= 1
            else:
                send(index, [member])

        for index, use in enumerate(uses):
            members.append([self.start(use.prompt, number) for number in range(size)])
            send(index, members[index])
        while open_turns or open_replies:
            future = done_futures.get()
            if future in open_replies:
                index, member = open_replies.pop(future)
                handle_reply(index, member, future.result())
            else:
                index, members_of_turn = open_turns.pop(future)
                for member, sequence in zip(
                    members_of_turn, future.result().sequences, strict=True
                ):
                    reply = self.submit_answer(member, sequence)
                    if isinstance(reply, EnvironmentReply):
                        handle_reply(index, member, reply)
                    else:
                        open_replies[reply] = (index, member)
                        reply.add_done_callback(done_futures.put)
            if unfinished[index] == 0:
                yield TrajectoryGroup(uses[index], tuple(m.trajectory for m in members[index]))

    completed = iter_groups  # the earlier name, for recipes outside this package

    def start(self, prompt: int, number: int) -> GroupMember:
        episode = self.environment.episode(prompt)
        return GroupMember(number, episode, Trajectory(self.text.first(episode.first_observation)))

    def submit_answer(
        self, member: GroupMember, sequence: Any
    ) -> "EnvironmentReply | Future[EnvironmentReply]":
        tokens = list(sequence.tokens)
        member.trajectory.act(tokens, list(sequence.logprobs))
        member.ended = bool(tokens) and tokens[-1] in self.text.stop
        return member.episode.answer(self.text.answer(tokens))

    def apply_reply(self, member: GroupMember, reply: EnvironmentReply) -> bool:
        """Apply the reply to an answer; whether the episode is over."""
        member.trajectory.reward += reply.reward
        if not reply.done:
            member.trajectory.observe(self.text.next(reply.observation, member.ended))
        return reply.done

    def sample(self, use: PromptUse, member: GroupMember, num_samples: int) -> Future[Any]:
        entropy = [self.seed, use.epoch, use.prompt, member.number, member.trajectory.turns]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 1)
        params = tinker.SamplingParams(
            max_tokens=self.settings.max_tokens,
            temperature=self.settings.temperature,
            stop=list(self.text.stop),
            seed=seed,
        )
        prompt = tinker.ModelInput.from_ints(list(member.trajectory.tokens))
        future: Future[Any] = self.sampler.sample(
            prompt=prompt, num_samples=num_samples, sampling_params=params
        )
        return future


class ReferenceModel:
    """Fixed weights that score trajectories: the base model, or saved weights by their path."""

    def __init__(self, service: tinker.ServiceClient, base: str, path: str = "") -> None:
        self._sampler: Any = (
            service.create_sampling_client(model_path=path)
            if path
            else service.create_sampling_client(base_model=base)
        )

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Floats]:
        """Log-probs of the sampled tokens of each trajectory; the requests are sent together."""
        futures = [
            self._sampler.compute_logprobs(tinker.ModelInput.from_ints(list(trajectory.tokens)))
            for trajectory in trajectories
        ]
        scores = [np.asarray(future.result()[1:], np.float32) for future in futures]
        return [
            row[np.asarray(trajectory.sampled[1:])]
            for row, trajectory in zip(scores, trajectories, strict=True)
        ]


def kl_estimate(policy: Sequence[Floats], reference: Sequence[Floats]) -> float:
    """KL of the policy to the reference over its own tokens, never below 0: E[r - 1 - log r]."""
    gaps = np.concatenate(list(reference)) - np.concatenate(list(policy))
    return float(np.mean(np.expm1(gaps) - gaps)) if gaps.size else 0.0
