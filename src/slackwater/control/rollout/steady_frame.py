"""A frame of the same attempts as the last one: appended column by column, without looking turns up again."""

from collections.abc import Sequence

from slackwater.control.rollout.live_turn import LiveTurn


class SteadyFrame:
    """The attempts of an instance's last frame, and how many more such frames all their budgets allow.

    Whoever takes a turn off the instance must forget the instance's steady frame.
    """

    __slots__ = ("_attempts", "_keep_logprob", "_keep_token", "_room")

    def __init__(self, attempts: Sequence[int], turns: Sequence[LiveTurn]) -> None:
        self._attempts = list(attempts)
        self._keep_token = [turn.tokens.append for turn in turns]
        self._keep_logprob = [turn.logprobs.append for turn in turns]
        self._room = min(turn.limit - len(turn.tokens) for turn in turns)

    @staticmethod
    def of(attempts: Sequence[int], turns: Sequence[LiveTurn | None]) -> "SteadyFrame | None":
        """Only for turns that need nothing but their token kept, each once in a frame."""
        plain = [
            turn
            for turn in turns
            if turn is not None and turn.topk is None and not turn.spec.stream
        ]
        if not plain or len(plain) < len(attempts) or len(set(attempts)) < len(attempts):
            return None
        return SteadyFrame(attempts, plain)

    def take(
        self, attempts: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> bool:
        """Append the frame if it is of the same attempts and within every budget."""
        if self._room <= 0 or attempts != self._attempts:
            return False
        self._room -= 1
        for keep, token in zip(self._keep_token, tokens, strict=True):
            keep(token)
        for keep, logprob in zip(self._keep_logprob, logprobs, strict=True):
            keep(logprob)
        return True
