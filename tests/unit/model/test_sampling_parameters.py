"""Sampling parameters: what is refused."""

import math

import pytest

from slackwater.model.errors import ConfigError
from slackwater.model.sampling import Sampling

COUNTS = (
    "max_tokens",
    "min_tokens",
    "topk_prompt_logprobs",
    "topk_logprobs",
    "prompt_alternatives",
)


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_count_below_zero_or_no_number_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: {value} must not be negative"):
        Sampling(**{"max_tokens": 4, field: value})  # type: ignore[arg-type]  # what a client may send
