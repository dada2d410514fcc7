"""The environment interface.

An environment's class is also its frozen configuration, with its number of prompts.
`episode(prompt)` starts one interaction; the same prompt always starts the same one, so a group of
samples faces one task.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from slackwater.model.errors import ConfigError
from slackwater.rl.text import Observation

T = TypeVar("T", bound=Observation)


@dataclass(frozen=True, slots=True)
class EnvironmentReply:
    """The next observation or the end; an episode's rewards add up."""

    observation: str
    reward: float
    done: bool


class Episode(Protocol):
    """One interaction, in text."""

    @property
    def first_observation(self) -> Observation: ...

    def answer(self, text: str) -> "EnvironmentReply | Future[EnvironmentReply]":
        """Take the model's answer, any text; slow results come as a future."""


class EpisodeEnvironment(Protocol):
    """A family of tasks, one per prompt from 0 to `prompts - 1`."""

    @property
    def prompts(self) -> int: ...

    def episode(self, prompt: int) -> Episode: ...

    def demonstration(self, prompt: int) -> tuple[tuple[Observation, str], ...]:
        """Observations with well-formed answers, not necessarily good ones, to teach the format."""


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """An episode of one turn, whose reward is the score of the answer."""

    first_observation: T
    score: Callable[[str], float]

    def answer(self, text: str) -> EnvironmentReply:
        return EnvironmentReply("", self.score(text), True)


class PromptEpisode(Protocol):
    """An episode with immediate replies in plain text."""

    @property
    def first_observation(self) -> str: ...

    def answer(self, text: str) -> EnvironmentReply: ...


def play_blindly(episode: PromptEpisode, answer: Callable[[], str]) -> tuple[tuple[str, str], ...]:
    """An episode's observations, with answers that ignore them."""
    observation, turns = episode.first_observation, []
    while True:
        turns.append((observation, answer()))
        reply = episode.answer(turns[-1][1])
        if reply.done:
            return tuple(turns)
        observation = reply.observation


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuse a setting below `least`."""
    if value < least:
        raise ConfigError.of(name, value, f"must be at least {least}")


# The earlier names, for environments outside this package.
at_least, played = check_at_least, play_blindly
