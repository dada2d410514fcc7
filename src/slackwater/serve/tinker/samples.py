"""Tinker API routes of front ends: samples, and results of requests."""

import json
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from slackwater.model.errors import ConfigError, RefusedError
from slackwater.model.ids import RequestId, TenantId
from slackwater.model.operation import FaultOwner, OpKind
from slackwater.model.sampling import default_seed, sample_seed
from slackwater.model.session import SamplingSession
from slackwater.runtime.store.base_models import BaseModel
from slackwater.runtime.store.op_payloads import (
    SamplePayload,
    TargetTokens,
    decode_sample_result,
    encode,
)
from slackwater.runtime.store.outcomes import RequestOutcome
from slackwater.serve.front.gateway import Gateway
from slackwater.serve.http.auth import Caller
from slackwater.serve.http.errors import GoneError
from slackwater.serve.http.large_bodies import LargeBodyRoute
from slackwater.serve.tinker import bodies, json_results
from slackwater.serve.tinker import proto as tinker_proto
from slackwater.serve.tinker.bodies import TensorBody
from slackwater.wire.batches import decode_metrics, decode_result
from slackwater.wire.front import RequestPending

_NAME = "target_prompt_logprobs"
_LARGE_RESULT_BYTES = 64 << 10


def target_tokens(given: TensorBody, rows: int, base: BaseModel) -> TargetTokens:
    """Target tokens by position; refuses shapes and tokens that do not fit the prompt."""
    shape = given.shape or []
    if given.dtype != "int64" or len(shape) != 2 or shape[0] != rows or rows == 0:
        fix = f"must be an int64 tensor of shape [{rows}, K] for this prompt"
        raise ConfigError.of(_NAME, f"{given.dtype} {shape}", fix)
    tokens = [int(token) for token in given.data]
    edges, columns = list(given.sparse_crow_indices or ()), list(given.sparse_col_indices or ())
    bad = [token for token in tokens if not -1 <= token < base.vocab_size]
    if bad:
        raise ConfigError.of(f"{_NAME}: token", bad[0], f"must be below {base.vocab_size}, or -1")
    width = shape[1]
    if given.sparse_crow_indices is None:
        if len(tokens) != rows * width:
            raise ConfigError.of(f"{_NAME}: data", len(tokens), f"must hold {rows * width} values")
        return TargetTokens([tokens[at * width : (at + 1) * width] for at in range(rows)], width)
    return _sparse(tokens, rows, width, edges, columns)


def _sparse(
    tokens: list[int], rows: int, width: int, edges: list[int], columns: list[int]
) -> TargetTokens:
    well_formed = (
        len(columns) == len(tokens)
        and len(edges) == rows + 1
        and edges[0] == 0
        and edges[-1] == len(tokens)
        and all(first <= last for first, last in pairwise(edges))
        and all(0 <= column < width for column in columns)
    )
    if not well_formed:
        fix = "are no CSR matrix of this shape"
        raise ConfigError.of(f"{_NAME}: sparse indices", [rows, width], fix)
    return TargetTokens([tokens[first:last] for first, last in pairwise(edges)], width, columns)


async def sample(gateway: Gateway, tenant: TenantId, body: bodies.SampleBody) -> RequestId:
    """Submit a sample; returns its id once it is durable."""
    if body.sampling_session_id is None or body.seq_id is None:
        raise ConfigError.of(
            "sampling_session_id", body.sampling_session_id, "must be given, with seq_id"
        )
    if body.record_stability_info:
        raise RefusedError(
            "record_stability_info: is not supported, because the loss stable_reinforce that reads "
            "it has no published definition; leave it out"
        )
    session = await gateway.session(tenant, body.sampling_session_id)
    base = gateway.bases.get(session.base_model)
    base.check_length(range(sum(len(chunk.tokens) for chunk in body.prompt.chunks)))
    seeds = _seeds(body, session, body.seq_id)
    if body.target_prompt_logprobs is None:
        payload = _payload(body, base, seeds)
    else:
        payload = await gateway.fair_work.run(tenant, _payload, body, base, seeds)
    return await gateway.sample(tenant, session, body.seq_id, encode(payload))


def _seeds(body: bodies.SampleBody, session: SamplingSession, seq: int) -> list[int]:
    given = body.sampling_params.seed
    if given is not None:
        return [sample_seed(given % 2**63, index) for index in range(body.num_samples)]
    return [default_seed(session.lineage, seq, index) for index in range(body.num_samples)]


def _payload(body: bodies.SampleBody, base: BaseModel, seeds: list[int]) -> SamplePayload:
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    room = base.room_after(prompt)
    last = body.prompt_logprobs_last_n
    if last is not None and (not body.prompt_logprobs or last >= len(prompt)):
        raise ConfigError.of(
            "prompt_logprobs_last_n", last, "needs prompt_logprobs and a longer prompt"
        )
    params = body.sampling_params
    stop_tokens, stop_strings = stops_of(params.stop, base)
    targets = body.target_prompt_logprobs
    return SamplePayload(
        prompt=np.asarray(prompt, "<i4").tobytes(),
        seeds=seeds,
        max_tokens=min(params.max_tokens or room, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        stop_token_ids=stop_tokens,
        stop_strings=stop_strings,
        prompt_logprobs=bool(body.prompt_logprobs) or body.topk_prompt_logprobs > 0,
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_logprobs=body.topk_sample_logprobs,
        prompt_logprobs_last_n=last,
        targets=None if targets is None else target_tokens(targets, len(prompt) - 1, base),
        alternatives=body.prompt_alt_tokens_k if len(prompt) > 1 else 0,
    )


def stops_of(
    stop: str | list[str] | list[int] | None, base: BaseModel
) -> tuple[list[int], list[str]]:
    """Stop tokens and strings: None means the model's, a list adds to them, [] disables all."""
    ends = list(base.stop_token_ids)
    if stop is None:
        return ends, []
    if isinstance(stop, str):
        return ends, [stop]
    tokens = [item for item in stop if isinstance(item, int)]
    strings = [item for item in stop if isinstance(item, str)]
    if "" in strings:
        raise ConfigError.of("stop", "", "must not hold an empty string")
    return (sorted({*ends, *tokens}) if stop else []), strings


def render(outcome: RequestOutcome, *, as_json: bool = False) -> Response:
    """The response of retrieve_future; older SDKs get samples and passes as JSON."""
    if outcome.error is not None:
        category = "user" if outcome.owner is FaultOwner.USER else "server"
        return JSONResponse({"error": outcome.error, "category": category})
    if outcome.result is None:
        raise GoneError("request_id: its result was acknowledged or has expired")
    match outcome.kind:
        case "sample":
            sampled = decode_sample_result(outcome.result)
            if as_json:
                return JSONResponse(json_results.sample_result(sampled))
            data = tinker_proto.encode_sample_result(sampled)
            return Response(data, media_type=tinker_proto.MEDIA_TYPE)
        case OpKind.FORWARD | OpKind.FORWARD_BACKWARD:
            passed = decode_result(outcome.result)
            if as_json:
                return JSONResponse(json_results.pass_result(passed))
            data = tinker_proto.encode_pass_result(passed)
            return Response(data, media_type=tinker_proto.MEDIA_TYPE)
        case OpKind.OPTIM_STEP:
            return JSONResponse({"metrics": decode_metrics(outcome.result), "type": "optim_step"})
        case _:
            return JSONResponse(json.loads(outcome.result))


def sample_routes(gateway: Gateway) -> APIRouter:
    router = APIRouter(route_class=LargeBodyRoute, prefix="/api/v1", tags=["tinker: sampling"])

    @router.post("/asample")
    async def asample(body: bodies.SampleBody, tenant: Caller) -> dict[str, Any]:
        request = await sample(gateway, tenant, body)
        ids = [f"{request}/{index}" for index in range(body.num_samples)]
        return {"request_id": request, "sample_sequence_ids": ids}

    @router.post("/retrieve_future")
    async def retrieve(
        body: bodies.RetrieveFutureBody, tenant: Caller, request: Request
    ) -> Response:
        """Wait for a result; 408 if it is not there after the hold time."""
        wanted = RequestId(body.request_id)
        outcome = await gateway.outcome(tenant, wanted, gateway.setup.hold_s)
        if not isinstance(outcome, RequestPending):
            as_json = json_results.wants_json(request.headers.get("accept"))
            rendered = partial(render, outcome, as_json=as_json)
            if len(outcome.result or b"") > _LARGE_RESULT_BYTES:
                return await gateway.fair_work.run(tenant, rendered)
            return rendered()
        paused = outcome.paused
        pending = {
            "type": "try_again",
            "request_id": body.request_id,
            "queue_state": "active" if paused is None else "paused_capacity",
        }
        return JSONResponse(
            pending if paused is None else pending | {"queue_state_reason": paused}, 408
        )

    return router
