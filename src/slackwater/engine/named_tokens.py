"""Tokens that a request names must be in the vocabulary."""

from slackwater.engine.request import GenerationRequest
from slackwater.model.errors import ConfigError


def check_named_tokens(request: GenerationRequest, vocab_size: int) -> None:
    """Biased, allowed and target tokens; targets are a row for every position of the prompt after
    the first.
    """
    params, rows = request.params, request.params.target_prompt_tokens
    biased = [token for token, _ in params.logit_bias]
    worded = [token for word in params.bad_words for token in word]
    named = (("logit_bias", biased), ("allowed_token_ids", params.allowed_token_ids))
    for name, tokens in (*named, ("bad_words", worded)):
        bad = [token for token in tokens if not 0 <= token < vocab_size]
        if bad:
            raise ConfigError.of(f"{name}: token", bad[0], f"must be below {vocab_size}")
    if rows and len(rows) != len(request.prompt) - 1:
        fix = f"must have {len(request.prompt) - 1} rows for this prompt"
        raise ConfigError.of("target_prompt_tokens", f"{len(rows)} rows", fix)
    bad = [token for row in rows for token in row if not -1 <= token < vocab_size]
    if bad:
        fix = f"must be below {vocab_size}, or -1"
        raise ConfigError.of("target_prompt_tokens: token", bad[0], fix)
