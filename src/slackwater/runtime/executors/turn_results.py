"""Listeners and results of turns, for processes that do not import the engines."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from slackwater.control.rollout import commands

TurnResult: TypeAlias = commands.CompleteTurn  # of a turn that is answered whole
TurnTokens: TypeAlias = commands.AppendTokens  # of a turn that streams


class TurnListener(Protocol):
    """Receives the tokens and the end of one turn."""

    def append(self, more: commands.AppendTokens) -> None: ...
    def stream(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None: ...
    def complete(self, result: TurnResult) -> None: ...
    def fail(self, error: str) -> None: ...
