"""Tiny models and requests for the engine's tests."""

from dataclasses import dataclass, field

import numpy as np
import torch

from harness.packed_attention import PackedCausalAttention
from slackwater.engine.config import EngineConfig
from slackwater.engine.engine import Engine
from slackwater.engine.request import (
    FinishedGeneration,
    GenerationRequest,
    PromptScoreRows,
    TopTokens,
)
from slackwater.model.sampling import Sampling
from slackwater.nets.causal_lm import CausalLM
from slackwater.nets.config import NetConfig
from slackwater.nets.loading import load_net

VOCAB = 61
CONFIG = NetConfig(
    family="qwen3",
    qk_norm=True,
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_positions=512,
    init_std=0.35,
    tied=False,
)
KV_BYTES_PER_BLOCK = CONFIG.kv_values_per_token * 16 * 4


def net(seed: int = 0) -> CausalLM:
    torch.set_num_threads(1)
    return load_net(CONFIG, seed=seed)


def engine(*, blocks: int = 400, seed: int = 0, **config: object) -> Engine:
    """An engine with room for `blocks` blocks."""
    settings = {
        "kv_bytes": (blocks + 1) * KV_BYTES_PER_BLOCK,
        "page_bytes": 4096,
        "max_running": 16,
        "max_step_tokens": 64,
    }
    decode = config.pop("decode", None)
    eos = config.pop("eos", ())
    return Engine(net(seed), EngineConfig(**(settings | config)), decode, eos)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def request(
    request_id: int,
    tokens: tuple[int, ...],
    *,
    generated: tuple[int, ...] = (),
    version: str = "base",
    scores_prompt: bool = False,
    **params: object,
) -> GenerationRequest:
    return GenerationRequest(
        request_id,
        tokens,
        Sampling(**({"max_tokens": 12} | params)),  # type: ignore[arg-type]
        version,
        generated,
        scores_prompt,
    )


@dataclass
class Collected:
    """What came out of an engine, by request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finished: dict[int, FinishedGeneration] = field(default_factory=dict)
    scores: dict[int, PromptScoreRows] = field(default_factory=dict)
    top: dict[int, list[TopTokens]] = field(default_factory=dict)

    def take(self, source: Engine, *, decode: bool = True) -> None:
        """One step, checked."""
        out = source.step(decode=decode)
        source.check_integrity()
        rows = zip(
            out.request_ids.tolist(), out.tokens.tolist(), out.logprobs.tolist(), strict=True
        )
        for request_id, token, logprob in rows:
            assert request_id not in self.finished, "a finished request gives no more tokens"
            self.tokens.setdefault(request_id, []).append(token)
            self.logprobs.setdefault(request_id, []).append(logprob)
        for score in out.prompt_scores:
            assert score.request_id not in self.scores, "scores are told once"
            self.scores[score.request_id] = score
        for request_id, top in out.top.items():
            self.top.setdefault(request_id, []).append(top)
        for done in out.finished:
            assert done.request_id not in self.finished, "an end is told once"
            self.finished[done.request_id] = done


def run(source: Engine, *requests: GenerationRequest, steps: int = 5000) -> Collected:
    """Add all, and step until nothing is left."""
    collected = Collected()
    for one in requests:
        source.add(one)
    for _ in range(steps):
        if not source.busy:
            return collected
        collected.take(source)
    raise AssertionError("the engine did not finish")


def plain_logprobs(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    """Reference: one plain forward of the whole sequence, `[length, vocab]`."""
    with torch.no_grad():
        ids = torch.tensor(tokens)
        attention = PackedCausalAttention((0, len(tokens)))
        hidden = model.run_layers(ids, torch.arange(len(tokens)), attention)
        return torch.log_softmax(model.logits(hidden), -1)
