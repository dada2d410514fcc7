"""What older `tinker` SDKs send and read: batches and results as JSON, as 0.6 to 0.22 have it."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_app import open_model, post

from harness.service_plane import with_plane
from slackwater.model.errors import ConfigError
from slackwater.model.ids import RequestId, TenantId
from slackwater.model.operation import OpKind
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.op_payloads import SampleResult, SequencePayload, encode
from slackwater.runtime.store.outcomes import RequestOutcome
from slackwater.serve.tinker.pass_reader import JSON, JSON_FORWARD, PROTOBUF, PassHead, read_pass
from slackwater.serve.tinker.proto import pb
from slackwater.wire.batches import Array, PassBatch, PassResult, decode_batch, encode_result


def old_input(**changes: Any) -> dict[str, Any]:
    """As 0.22.7 wrote it for one datum of a text in two chunks."""
    chunks = [{"tokens": [5, 6], "type": "encoded_text"}, {"tokens": [7], "type": "encoded_text"}]
    inputs = {
        "target_tokens": {"data": [6, 7, 8], "dtype": "int64", "shape": [3]},
        "weights": {"data": [0.0, 1, -2.5], "dtype": "float32", "shape": [3]},
    }
    datum = {"loss_fn_inputs": inputs, "model_input": {"chunks": chunks}}
    return {
        "data": [datum],
        "loss_fn": "cross_entropy",
        "loss_fn_config": {"clip_low_threshold": 0.5},
        **changes,
    }


def old_body(name: str = "forward_backward_input", **changes: Any) -> bytes:
    return json.dumps({name: old_input(**changes), "model_id": "m", "seq_id": 3}).encode()


def new_body(*, forward_only: bool) -> bytes:
    """The same request as newer SDKs write it."""
    message = pb.ForwardBackwardRequest(
        model_id="m", seq_id=3, loss_fn="cross_entropy", forward_only=forward_only
    )
    message.loss_fn_config["clip_low_threshold"] = 0.5
    datum = message.data.add()
    for piece in ([5, 6], [7]):
        datum.model_input.add().encoded_text.tokens = np.array(piece, "<i4").tobytes()
    tensors = {
        "target_tokens": np.array([6, 7, 8], "<i8"),
        "weights": np.array([0, 1, -2.5], "<f4"),
    }
    for name, values in tensors.items():
        kind = pb.DTYPE_INT64 if values.dtype.kind == "i" else pb.DTYPE_FLOAT32
        tensor = pb.Tensor(dense=values.tobytes(), dtype=kind, shape=values.shape)
        datum.loss_fn_inputs[name].CopyFrom(tensor)
    encoded: bytes = message.SerializeToString()
    return encoded


def operation(body: bytes, form: str) -> tuple[PassHead, PassBatch]:
    """What a body asks for. Protobuf's maps have no order, so neither have the batch's bytes."""
    head, batch = read_pass(body, form)
    return head, decode_batch(batch)


def test_json_and_protobuf_are_the_same_operation() -> None:
    assert operation(old_body(), JSON) == operation(new_body(forward_only=False), PROTOBUF)
    forward = operation(old_body("forward_input"), JSON_FORWARD)
    assert forward == operation(new_body(forward_only=True), PROTOBUF)


def test_sparse_targets_are_taken_as_json_too() -> None:
    body = old_input()
    body["data"][0]["loss_fn_inputs"]["target_tokens"] = {
        "data": [7, 8],
        "dtype": "int64",
        "shape": [3, 4],
        "sparse_crow_indices": [0, 1, 1, 2],
        "sparse_col_indices": [2, 0],
    }
    head, batch = read_pass(old_body(**body), JSON)
    assert head.error is None
    assert batch


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": []}, "data"),
        ({"data": [{"model_input": {"chunks": []}, "loss_fn_inputs": {}}]}, "model_input"),
        (
            {"data": [{"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}}]},
            "text only",
        ),
        ({"loss_fn_config": {"x": "text"}}, "must be a number"),
        ({"surprise": 1}, "surprise"),
        ({"loss_fn": None}, "loss_fn"),
    ],
)
def test_a_wrong_batch_is_refused_by_name_and_uses_up_its_number(
    changes: dict[str, Any], said: str
) -> None:
    head, batch = read_pass(old_body(**changes), JSON)
    assert (head.model_id, head.seq_id, batch) == ("m", 3, b"")
    assert said in str(head.error)


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(body: bytes) -> None:
    for form in (JSON, JSON_FORWARD):
        with pytest.raises(ConfigError):
            read_pass(body, form)


def test_an_old_sdk_trains_and_reads_its_results_as_json(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, _ = await open_model(client)
        for seq, (path, name) in enumerate(
            (("forward_backward", "forward_backward_input"), ("forward", "forward_input")), 1
        ):
            body = {name: old_input(), "model_id": model, "seq_id": seq}
            taken = await post(client, path, **body)
            assert taken["model_id"] == model
            assert await post(client, path, **body) == taken  # a retry is the same operation
        # A batch that is wrong does not make the next operation wait for its number.
        wrong = {"forward_backward_input": old_input(data=[]), "model_id": model, "seq_id": 3}
        refused = await client.post("forward_backward", json=wrong)
        assert refused.status_code == 422
        again = await client.post("forward_backward", json=wrong | {"model_id": "other"})
        assert again.status_code == 404

        result = PassResult(
            [Array.from_numpy(np.array([-1.0, -math.inf], "<f4"))], {"loss:sum": 1.0}
        )
        drawn = SampleResult(
            [
                SequencePayload(
                    tokens=np.array([4], "<i4").tobytes(),
                    logprobs=np.array([-0.5], "<f4").tobytes(),
                    reason="stop",
                )
            ],
            prompt_logprobs=[None, -2.0],
        )
        outcomes = {
            "op-1": RequestOutcome(OpKind.FORWARD_BACKWARD, encode_result(result)),
            "sm-1": RequestOutcome("sample", encode(drawn)),
        }
        for request, outcome in outcomes.items():
            plane.board.expect(RequestId(request), TenantId("mine"))
            plane.board.settle(RequestId(request), outcome)

        async def retrieved(request: str, accept: str) -> httpx.Response:
            headers = {"accept": accept}
            return await client.post(
                "retrieve_future", json={"request_id": request}, headers=headers
            )

        passed = (await retrieved("op-1", "application/json")).json()
        assert passed == {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [
                {"logprobs": {"data": [-1.0, -99999.0], "dtype": "float32", "shape": [2]}}
            ],
            "metrics": {"loss:sum": 1.0},
        }
        sampled = (await retrieved("sm-1", "application/json")).json()
        assert sampled["sequences"] == [{"stop_reason": "stop", "tokens": [4], "logprobs": [-0.5]}]
        assert sampled["prompt_logprobs"] == [None, -2.0]
        for accept in ("application/x-protobuf, application/json", "*/*"):
            newer = await retrieved("sm-1", accept)
            assert newer.headers["content-type"] == "application/x-protobuf"

    with_plane(tmp_path, work)


def test_sdks_that_are_too_old_are_told_so_when_they_open_a_session(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        refused = await client.post("create_session", json={"sdk_version": "0.5.1"})
        assert refused.status_code == 422
        assert "'0.5.1' is too old: use tinker 0.6.0 or newer" in refused.json()["error"]
        for version in ("0.6.0", "0.36.0", "1.0.0.dev1", "a client of mine"):
            await post(client, "create_session", sdk_version=version)
        first = await client.post("create_model", json={"base_model": "tiny"})
        assert "use tinker 0.6.0 or newer" in first.json()["error"]

    with_plane(tmp_path, work)
