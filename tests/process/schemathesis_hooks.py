"""What schemathesis has to know of this service, in its own process."""

import json
import os
import random
from typing import Any

import schemathesis

from slackwater.serve.tinker.proto import MEDIA_TYPE

REAL: dict[str, object] = json.loads(os.environ["SCHEMATHESIS_REAL_VALUES"])
"""Names and ids that exist, by field: guessed ones would all end in "not found"."""

SHARE = 0.8
_draws = random.Random(0)


def put_real_values(fields: object) -> None:
    if isinstance(fields, dict):
        for key in fields.keys() & REAL.keys():
            if _draws.random() < SHARE:
                fields[key] = REAL[key]


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, object]
) -> None:
    if not case.path.endswith("/finish"):  # the real session has to last
        put_real_values(case.body)
        put_real_values(case.path_parameters)


@schemathesis.serializer(MEDIA_TYPE)
def as_bytes(context: schemathesis.SerializationContext, value: object) -> bytes:
    """Random bytes for the routes that take protobuf."""
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else str(data).encode()
