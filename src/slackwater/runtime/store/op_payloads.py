"""What the durable log keeps of each kind of operation, and what it answers with.

Every row names its `FORMAT`: 1 is version 0.1.0's; in 2 a load names its state by URI.
"""

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from slackwater.model.adam import Adam
from slackwater.model.uri import SCHEME
from slackwater.runtime.executors.turn_results import TurnResult

FORMAT = 2


class SavePayload(msgspec.Struct, frozen=True):
    """A named save; `path` is what it will be known as."""

    path: str
    name: str
    ttl_s: float | None = None
    user_metadata: dict[str, str] | None = None


class LoadPayload(msgspec.Struct, frozen=True):
    """A load from a saved state, whose URI is `held_as` (a path in messages of version 0.1.0)."""

    path: str
    held_as: str
    optimizer: bool

    @property
    def saved(self) -> str:
        """The state's URI; format 1 has a path: .../STATE/checkpoints/MODEL/NAME@SEQ."""
        if self.held_as.startswith(SCHEME):
            return self.held_as
        return SCHEME + "/".join(self.held_as.split("/")[-3:])


class PublishPayload(msgspec.Struct, frozen=True):
    """Weights for samplers: under a name, or for a sampling session of their own."""

    version: str
    save: SavePayload | None = None
    sampling_session: str | None = None
    sampling_seq: int | None = None


class SequencePayload(msgspec.Struct, frozen=True, array_like=True):
    """One sampled sequence: i32 tokens, f32 log-probs, and the best alternatives if asked."""

    reason: str
    tokens: bytes
    logprobs: bytes
    topk: list[list[tuple[int, float]]] = []


class TargetTokens(msgspec.Struct, frozen=True):
    """Tokens to score at every position after the first; `columns` are those of a sparse matrix."""

    rows: list[list[int]]
    width: int
    columns: list[int] | None = None

    def scores(self, rows: Iterable[Iterable[float]]) -> "TargetScores":
        return TargetScores([list(row) for row in rows], self.width, self.columns)


_NAMED_PER_TURN = 4096  # tokens with their scores, about 100 bytes each


class SamplePayload(msgspec.Struct, frozen=True):
    """A sample request as it is kept until it is answered; `seeds` has one per sequence."""

    prompt: bytes
    seeds: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: list[int]
    stop_strings: list[str]
    prompt_logprobs: bool
    topk_prompt_logprobs: int
    topk_logprobs: int
    prompt_logprobs_last_n: int | None = None
    targets: TargetTokens | None = None
    alternatives: int = 0

    @property
    def share(self) -> int:
        """What counts towards the tenant's turns: its samples, and one more for every few thousand
        tokens that may be named beside those drawn, which stay in memory until the last sample has
        ended.
        """
        of_prompt = len(self.prompt) // 4 * (self.topk_prompt_logprobs + self.alternatives)
        of_samples = len(self.seeds) * self.max_tokens * self.topk_logprobs
        return len(self.seeds) + (of_prompt + of_samples) // _NAMED_PER_TURN


class TargetScores(msgspec.Struct, frozen=True):
    """Log-probs of `TargetTokens`, in the same layout."""

    rows: list[list[float]]
    width: int
    columns: list[int] | None = None


class SampleResult(msgspec.Struct, frozen=True):
    """What a sample request gave."""

    sequences: list[SequencePayload]
    prompt_logprobs: list[float | None] | None = None
    prompt_topk: list[list[tuple[int, float]] | None] = []
    targets: TargetScores | None = None
    alternatives: list[list[tuple[int, float]]] = []

    @classmethod
    def of(cls, sample: SamplePayload, turns: Sequence[TurnResult]) -> "SampleResult":
        """The answer to a sample request from its turns, in the order of its seeds."""
        sequences = [
            SequencePayload(
                turn.reason,
                array("i", turn.tokens).tobytes(),
                array("f", turn.logprobs).tobytes(),
                [list(row) for row in turn.topk],
            )
            for turn in turns
        ]
        first = turns[0]
        scores = first.prompt_logprobs
        if scores is None:
            return cls(sequences)
        shown = sample.prompt_logprobs_last_n or len(scores)
        hidden = len(scores) - shown
        own = [None if place < hidden else score for place, score in enumerate(scores)]
        return cls(
            sequences,
            own if sample.prompt_logprobs else None,
            [
                None if row is None or place < hidden else list(row)
                for place, row in enumerate(first.prompt_topk)
            ],
            None if sample.targets is None else sample.targets.scores(first.prompt_targets),
            [list(row) for row in first.prompt_alternatives],
        )


encode = msgspec.msgpack.Encoder().encode
decode_optim = msgspec.msgpack.Decoder(Adam).decode
decode_save = msgspec.msgpack.Decoder(SavePayload).decode
decode_load = msgspec.msgpack.Decoder(LoadPayload).decode
decode_publish = msgspec.msgpack.Decoder(PublishPayload).decode
decode_sample = msgspec.msgpack.Decoder(SamplePayload).decode
decode_sample_result = msgspec.msgpack.Decoder(SampleResult).decode
