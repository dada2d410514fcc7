"""Translates a request body to sampling parameters."""

from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Grammar, Sampling
from slackwater.runtime.store.base_models import BaseModel
from slackwater.serve.openai.bodies import ChatBody, CompletionBody, GenerationBody
from slackwater.serve.openai.text import TextCodec


def to_sampling(
    body: GenerationBody, base: BaseModel, max_tokens: int, seed: int, grammar: Grammar | None
) -> Sampling:
    """Sampling parameters, checked against the model."""
    _, topk, scores = _tokens_and_scores(body)
    if body.ignore_eos and grammar is not None:
        raise ConfigError.of("ignore_eos", True, "excludes structured output; set one of them")
    stops = [] if body.ignore_eos else base.stop_token_ids
    return Sampling(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=seed,
        stop_token_ids=sorted({*stops, *(body.stop_token_ids or ())}),
        stop_strings=body.stop_strings,
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_check_biases(base, body.biases()),
        allowed_token_ids=_check_allowed_tokens(body, base),
        grammar=grammar,
        prompt_logprobs=scores or body.prompt_logprobs is not None,
        topk_prompt_logprobs=max(topk if scores else 0, body.prompt_logprobs or 0),
        topk_logprobs=topk,
    )


def most_tokens(body: GenerationBody, base: BaseModel, prompt: list[int]) -> int:
    """The maximum number of tokens after this prompt."""
    room = base.room_after(prompt)
    wanted, _, _ = _tokens_and_scores(body)
    # Engines score a prompt on the way to its first token: for 0 tokens, one is drawn and dropped.
    return room if wanted is None else min(max(wanted, 1), room)


def bad_word_tokens(codec: TextCodec, words: list[str]) -> list[list[int]]:
    """Each word at the start of a text and after a space, where those tokenize differently."""
    found: list[list[int]] = []
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            tokens = codec.encode(text, special=False)
            if tokens and tokens not in found:
                found.append(tokens)
    return found


def _check_biases(base: BaseModel, biases: list[tuple[int, float]]) -> list[tuple[int, float]]:
    for token, _ in biases:
        if token >= base.vocab_size:
            raise ConfigError.of("logit_bias: token", token, f"must be below {base.vocab_size}")
    return biases


def _check_allowed_tokens(body: GenerationBody, base: BaseModel) -> list[int]:
    tokens = sorted(set(body.allowed_token_ids or ()))
    if body.allowed_token_ids is not None and not tokens:
        raise ConfigError.of("allowed_token_ids", [], "must hold at least one token")
    if tokens and tokens[-1] >= base.vocab_size:
        fix = f"must be below {base.vocab_size}"
        raise ConfigError.of("allowed_token_ids: token", tokens[-1], fix)
    return tokens


def _tokens_and_scores(body: GenerationBody) -> tuple[int | None, int, bool]:
    """Tokens wanted, alternatives per token, and whether the prompt is scored for its echo."""
    if isinstance(body, ChatBody):
        wanted = body.max_completion_tokens or body.max_tokens
        return wanted, (body.top_logprobs or 0) if body.logprobs else 0, False
    assert isinstance(body, CompletionBody)
    echo_scores = bool(body.echo) and body.logprobs is not None
    return body.max_tokens, body.logprobs or 0, echo_scores
