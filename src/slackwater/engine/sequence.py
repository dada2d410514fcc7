"""One request inside the engine: what of it is known, cached and still wanted."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.block_pool import Digest, chain
from slackwater.engine.request import Finished, GenerationRequest, Guide, PromptScoreRows, TopTokens
from slackwater.engine.versions import Version

_PADDING_LOGPROB = -99999.0


def _empty(size: int, k: int) -> TopTokens | None:
    if k == 0:
        return None
    padding = np.full((size, k), _PADDING_LOGPROB, np.float32)
    return TopTokens(np.zeros((size, k), np.uint32), padding)


@dataclass(slots=True)
class PromptScoring:
    """Scores of a prompt as its chunks go by."""

    logprobs: NDArray[np.float32]
    top: TopTokens | None
    wanted: tuple[NDArray[np.int64], ...] = ()
    targets: tuple[NDArray[np.float32], ...] = ()
    alternatives: TopTokens | None = None
    seed: int = 0
    temperature: float = 1.0

    @classmethod
    def of(cls, request: GenerationRequest) -> "PromptScoring":
        size, params = len(request.prompt), request.params
        wanted = tuple(np.asarray(row, np.int64) for row in params.target_prompt_tokens)
        return cls(
            np.full(size, np.nan, np.float32),
            _empty(size, request.topk_prompt_logprobs),
            wanted,
            tuple(np.zeros(len(row), np.float32) for row in wanted),
            _empty(size - 1, params.prompt_alternatives),
            params.seed,
            params.temperature,
        )


@dataclass(slots=True)
class Sequence:
    """`order` is its arrival, which a preemption keeps; `names` are its full blocks' so far.

    While it runs, its newest tokens are in its slot; a preemption brings them back to `request`.
    """

    request: GenerationRequest
    order: int
    version: Version
    stop_ids: frozenset[int]
    names: list[Digest]
    scoring: PromptScoring | None
    guide: Guide | None = None
    cached_tokens: int = 0
    slot: int | None = None

    @property
    def known_tokens(self) -> int:
        return len(self.request.prompt) + len(self.request.generated)

    def known(self) -> NDArray[np.int32]:
        return np.array((*self.request.prompt, *self.request.generated), np.int32)

    def extend_names(self, tokens: NDArray[np.int32], block_tokens: int) -> None:
        """Name every block that `tokens` fill; `names[0]` is the version's root."""
        for block in range(len(self.names) - 1, len(tokens) // block_tokens):
            start = block * block_tokens
            self.names.append(chain(self.names[-1], tokens[start : start + block_tokens]))

    def keep(self, known: NDArray[np.int32]) -> None:
        """Take its tokens so far out of the slot that it is about to lose."""
        generated = tuple(known[len(self.request.prompt) :].tolist())
        self.request = replace(self.request, generated=generated)

    def scores(self) -> PromptScoreRows:
        assert self.scoring is not None
        held = self.scoring
        return PromptScoreRows(
            self.request.request_id, held.logprobs, held.top, held.targets, held.alternatives
        )

    def finished_before_running(self, context: int) -> Finished | None:
        """A request that is complete as it comes: told so without a step of work."""
        request = self.request
        if self.scoring is not None:
            return None
        if request.generated and request.generated[-1] in self.stop_ids:
            return Finished(request.request_id, "stop")
        if self.guide is not None and self.guide.stopped:
            return Finished(request.request_id, "stop")
        limit = min(len(request.prompt) + request.params.max_tokens, context)
        if self.known_tokens >= limit:
            return Finished(request.request_id, "length")
        return None
