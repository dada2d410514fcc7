"""One request inside the engine: its tokens, its cached blocks and what it still has to compute."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slackwater.engine.block_pool import Digest, chain
from slackwater.engine.request import (
    FinishedGeneration,
    GenerationRequest,
    Guide,
    PromptScoreRows,
    TopTokens,
)
from slackwater.engine.versions import Version

_PADDING_LOGPROB = -99999.0


def _empty(size: int, k: int) -> TopTokens | None:
    if k == 0:
        return None
    padding = np.full((size, k), _PADDING_LOGPROB, np.float32)
    return TopTokens(np.zeros((size, k), np.uint32), padding)


@dataclass(slots=True)
class PromptScoring:
    """Scores of a prompt, filled in as its chunks are computed."""

    logprobs: NDArray[np.float32]
    top: TopTokens | None
    target_ids: tuple[NDArray[np.int64], ...] = ()
    targets: tuple[NDArray[np.float32], ...] = ()
    alternatives: TopTokens | None = None
    seed: int = 0
    temperature: float = 1.0

    @classmethod
    def for_request(cls, request: GenerationRequest) -> "PromptScoring":
        size, params = len(request.prompt), request.params
        target_ids = tuple(np.asarray(row, np.int64) for row in params.target_prompt_tokens)
        return cls(
            np.full(size, np.nan, np.float32),
            _empty(size, params.topk_prompt_logprobs),
            target_ids,
            tuple(np.zeros(len(row), np.float32) for row in target_ids),
            _empty(size - 1, params.prompt_alternatives),
            params.seed,
            params.temperature,
        )


@dataclass(slots=True)
class Sequence:
    """`order` is the arrival order, which a preemption keeps; `block_names` name the full blocks.

    While the request runs, its newest tokens are in its slot; a preemption copies them back into
    `request`.
    """

    request: GenerationRequest
    order: int
    version: Version
    stop_ids: frozenset[int]
    block_names: list[Digest]
    scoring: PromptScoring | None
    guide: Guide | None = None
    cached_tokens: int = 0
    slot: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt) + len(self.request.generated)

    def all_tokens(self) -> NDArray[np.int32]:
        return np.array((*self.request.prompt, *self.request.generated), np.int32)

    def extend_block_names(self, tokens: NDArray[np.int32], block_tokens: int) -> None:
        """Name every block that `tokens` fill; `block_names[0]` is the version's root."""
        for block in range(len(self.block_names) - 1, len(tokens) // block_tokens):
            start = block * block_tokens
            self.block_names.append(
                chain(self.block_names[-1], tokens[start : start + block_tokens])
            )

    def save_generated(self, known: NDArray[np.int32]) -> None:
        """Copy the generated tokens out of the slot before the slot is released."""
        generated = tuple(known[len(self.request.prompt) :].tolist())
        self.request = replace(self.request, generated=generated)

    def scores(self) -> PromptScoreRows:
        scoring = self.scoring
        assert scoring is not None
        return PromptScoreRows(
            self.request.request_id,
            scoring.logprobs,
            scoring.top,
            scoring.targets,
            scoring.alternatives,
        )

    def finish_without_running(self, context: int) -> FinishedGeneration | None:
        """The result of a request that is complete on arrival and needs no step, otherwise None."""
        request = self.request
        if self.scoring is not None:
            return None
        if request.generated and request.generated[-1] in self.stop_ids:
            return FinishedGeneration(request.request_id, "stop")
        if self.guide is not None and self.guide.stopped:
            return FinishedGeneration(request.request_id, "stop")
        limit = min(len(request.prompt) + request.params.max_tokens, context)
        if self.num_tokens >= limit:
            return FinishedGeneration(request.request_id, "length")
        return None
