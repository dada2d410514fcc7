"""Results of samples and passes as JSON, for SDKs that do not name protobuf in `Accept`."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from slackwater.runtime.store.op_payloads import SampleResult
from slackwater.serve.tinker.proto import MEDIA_TYPE, NO_LOGPROB
from slackwater.wire.batches import PassResult


def wants_json(accept: str | None) -> bool:
    """Whether the client accepts JSON and not protobuf."""
    accepted = (accept or "").lower()
    return "application/json" in accepted and MEDIA_TYPE not in accepted


def pass_result(result: PassResult) -> dict[str, Any]:
    """A `ForwardBackwardOutput`."""
    outputs = [
        {
            "logprobs": {
                "data": _finite(array.numpy().ravel().tolist()),
                "dtype": array.dtype,
                "shape": list(array.shape),
            }
        }
        for array in result.logprobs
    ]
    return {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": outputs,
        "metrics": result.metrics,
    }


def sample_result(result: SampleResult) -> dict[str, Any]:
    """A `SampleResponse`."""
    scores = result.prompt_logprobs
    return {
        "type": "sample",
        "sequences": [
            {
                "stop_reason": sequence.reason,
                "tokens": np.frombuffer(sequence.tokens, "<i4").tolist(),
                "logprobs": _finite(np.frombuffer(sequence.logprobs, "<f4").tolist()),
            }
            for sequence in result.sequences
        ],
        "prompt_logprobs": None if scores is None else [_or_none(score) for score in scores],
        "topk_prompt_logprobs": result.prompt_topk or None,
    }


def _finite(values: Iterable[float]) -> list[float]:
    """Replace infinities, which JSON lacks, by the log-prob of padding."""
    return [value if math.isfinite(value) else NO_LOGPROB for value in values]


def _or_none(score: float | None) -> float | None:
    return score if score is None or math.isfinite(score) else None
