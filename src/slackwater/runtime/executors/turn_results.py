"""What the service is given of turns; apart from the engines, for processes that have none."""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from slackwater.control.rollout import commands as do

TurnResult: TypeAlias = do.CompleteTurn  # what the service is given of a turn
TurnTokens: TypeAlias = do.AppendTokens  # and of one that streams


class TurnListener(Protocol):
    """Who is told how a turn goes."""

    def append(self, more: do.AppendTokens) -> None: ...
    def stream(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None: ...
    def complete(self, result: TurnResult) -> None: ...
    def fail(self, error: str) -> None: ...
