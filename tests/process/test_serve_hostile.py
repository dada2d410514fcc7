"""Hostile input: clear errors, nothing lost, no 500."""

import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import tinker
from tinker import types

from slackwater.serve.tinker.proto import MEDIA_TYPE, pb

from .service_process import ServiceProcess

pytestmark = pytest.mark.process

TOKENS = list(b"good text")


@pytest.fixture(scope="module")
def sdk(service: ServiceProcess) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=service.url, api_key=service.key)


@dataclass
class SlowClients:
    """They dribble from the first test of this file on, and remember whether the service hung up on
    them.
    """

    threads: list[threading.Thread] = field(default_factory=list)
    hung_up: set[str] = field(default_factory=set)


@pytest.fixture(scope="module", autouse=True)
def slow_clients(service: ServiceProcess) -> SlowClients:
    host, port = service.url.removeprefix("http://").split(":")
    slow_ones = SlowClients()

    def dribble(name: str, head: bytes) -> None:
        """Send a head, then a byte a second, until the service hangs up."""
        with socket.create_connection((host, int(port)), timeout=240) as slow:
            started_s = time.monotonic()
            slow.sendall(head)
            slow.settimeout(1.0)
            while name not in slow_ones.hung_up and time.monotonic() - started_s < 120:
                try:
                    if name == "head":
                        slow.sendall(b"x")
                    if not slow.recv(4096):
                        slow_ones.hung_up.add(name)
                except TimeoutError:
                    continue
                except OSError:
                    slow_ones.hung_up.add(name)

    request = b"POST /api/v1/telemetry HTTP/1.1\r\nHost: x\r\n"
    stories = {"head": request + b"X-Slow: ", "body": request + b"Content-Length: 9\r\n\r\n{"}
    for story in stories.items():
        slow_ones.threads.append(threading.Thread(target=dribble, args=story))
        slow_ones.threads[-1].start()
    return slow_ones


def tensor(values: list[float]) -> types.TensorData:
    return types.TensorData(data=values, dtype="float32", shape=[len(values)])


def policy_example(advantage: float) -> types.Datum:
    count = len(TOKENS) - 1
    targets = types.TensorData(data=TOKENS[1:], dtype="int64", shape=[count])
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": targets,
            "logprobs": tensor([-5.0] * count),
            "advantages": tensor([advantage] * count),
        },
    )


def test_nan_advantages_fail_their_step_and_nothing_after_it(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    good = client.forward_backward([policy_example(1.0)], "importance_sampling")
    bad = client.forward_backward([policy_example(math.nan)], "importance_sampling")
    step = client.optim_step(types.AdamParams())
    good.result()
    with pytest.raises(tinker.RequestFailedError, match="advantages"):
        bad.result()
    with pytest.raises(tinker.RequestFailedError, match="forward_backward seq 2 failed"):
        step.result()
    client.forward_backward([policy_example(1.0)], "importance_sampling").result()
    stepped = client.optim_step(types.AdamParams()).result()
    assert stepped.metrics is not None
    assert stepped.metrics["accumulated_passes"] == 1.0


def test_a_loss_or_a_token_that_does_not_exist_is_named(sdk: tinker.ServiceClient) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    with pytest.raises(tinker.RequestFailedError, match="stable_reinforce"):
        client.forward_backward([policy_example(1.0)], "stable_reinforce").result()
    far = types.Datum(
        model_input=types.ModelInput.from_ints([1, 99_999]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=[1, 1], dtype="int64", shape=[2]),
            "weights": tensor([1.0, 1.0]),
        },
    )
    with pytest.raises(tinker.RequestFailedError, match="99999"):
        client.forward_backward([far], "cross_entropy").result()


def send_pass(service: ServiceProcess, body: bytes, **headers: str) -> httpx.Response:
    sent = {"x-api-key": service.key, "content-type": MEDIA_TYPE, **headers}
    url = f"{service.url}/api/v1/forward_backward"
    return httpx.post(url, content=body, headers=sent, timeout=240)


def is_clear(answer: httpx.Response, status: int, said: str) -> None:
    assert answer.status_code == status, answer.text
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    assert said in answer.json()["error"]


def test_wrong_dtypes_garbage_and_oversized_bodies_are_clear_errors(
    service: ServiceProcess, sdk: tinker.ServiceClient
) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    message = pb.ForwardBackwardRequest(model_id=client.model_id, seq_id=1, loss_fn="cross_entropy")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = b"\1\0\0\0"
    datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(dense=b"\0\0", dtype=pb.DTYPE_BFLOAT16))
    is_clear(send_pass(service, message.SerializeToString()), 422, "data[0]: weights: dtype")
    is_clear(send_pass(service, b"\xff\xff\xff"), 422, "protobuf")
    is_clear(send_pass(service, b"x", **{"content-encoding": "zstd"}), 422, "decompressed")
    is_clear(send_pass(service, b"\0" * (65 << 20)), 413, "at most")
    step = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": "fast"}}
    is_clear(service.post("/api/v1/optim_step", step), 422, "learning_rate")
    # Both numbers are used up: the client goes on with the third.
    third = {"model_id": client.model_id, "seq_id": 3, "adam_params": {}}
    request = service.post("/api/v1/optim_step", third).json()["request_id"]
    done = service.post("/api/v1/retrieve_future", {"request_id": request})
    assert done.json()["metrics"]["optimizer_steps"] == 0.0


def test_another_tenants_ids_are_not_there(
    service: ServiceProcess, sdk: tinker.ServiceClient
) -> None:
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    path = client.save_state("mine").result().path
    session = client.model_id.split(":")[0]
    sampler = service.post(
        "/api/v1/create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 77, "base_model": "tiny"},
    ).json()["sampling_session_id"]
    step = {"model_id": client.model_id, "seq_id": 2, "adam_params": {}}
    request = service.post("/api/v1/optim_step", step).json()["request_id"]
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text"}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt}
    theirs = service.key_of("other")
    for path_asked, body in (
        ("get_info", {"model_id": client.model_id}),
        ("optim_step", step | {"seq_id": 3}),
        ("retrieve_future", {"request_id": request}),
        ("session_heartbeat", {"session_id": session}),
        ("weights_info", {"tinker_path": path}),
        ("asample", sample),
        ("retrieve_futures", {"target": {"sampling_session_id": sampler}}),
    ):
        answer = service.post(f"/api/v1/{path_asked}", body, key=theirs)
        assert answer.status_code == 404, (path_asked, answer.text)
        mine = service.post(f"/api/v1/{path_asked}", body)
        assert mine.status_code == 200, (path_asked, mine.text)
    assert (
        service.post("/api/v1/get_info", {"model_id": client.model_id}, key="").status_code == 401
    )


def test_unknown_paths_methods_and_broken_json_are_clear_errors(service: ServiceProcess) -> None:
    is_clear(service.post("/api/v1/nothing", {}), 404, "no such path")
    assert service.get("/api/v1/optim_step").status_code == 405
    broken = httpx.post(
        f"{service.url}/api/v1/optim_step",
        content=b'{"model_id": ',
        headers={"x-api-key": service.key, "content-type": "application/json"},
    )
    is_clear(broken, 422, "JSON")
    too_many = {
        "sampling_session_id": "x",
        "seq_id": 1,
        "num_samples": 10**9,
        "prompt": {"chunks": []},
    }
    is_clear(service.post("/api/v1/asample", too_many), 422, "num_samples")


def test_random_bytes_on_the_port_harm_nobody(service: ServiceProcess) -> None:
    host, port = service.url.removeprefix("http://").split(":")
    noise = random.Random(3)
    for size in (1, 10, 1000, 100_000):
        with socket.create_connection((host, int(port)), timeout=240) as raw:
            try:
                raw.sendall(noise.randbytes(size))
                raw.shutdown(socket.SHUT_WR)
                raw.recv(4096)
            except OSError:
                continue
    assert service.get("/healthz").status_code == 200


def test_no_request_that_the_document_allows_or_forbids_is_a_server_error(
    service: ServiceProcess, sdk: tinker.ServiceClient, tmp_path: Path
) -> None:
    # A process of its own: on Python 3.11 two threads that parse source at the same time break each
    # other (SystemError), and the SDK's threads here do so whenever they log a traceback.
    client = sdk.create_lora_training_client(base_model="tiny", rank=2)
    session = client.model_id.split(":")[0]
    sampler = service.post(
        "/api/v1/create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 78, "base_model": "tiny"},
    ).json()["sampling_session_id"]
    real: dict[str, str | None] = {
        "model": "tiny",
        "name": "tiny",
        "base_model": "tiny",
        "session_id": session,
    }
    real |= {"model_id": client.model_id, "run_id": client.model_id, "sampler_id": sampler}
    real |= {"sampling_session_id": sampler, "model_path": None}
    assert service.get("/openapi.json").status_code == 200  # made once; it waits 10 s for that
    report = tmp_path / "report.json"
    attack = subprocess.run(
        [
            *(str(Path(sys.executable).with_name("schemathesis")), "run"),
            f"{service.url}/openapi.json",
            *("--header", f"x-api-key:{service.key}", "--checks", "not_a_server_error"),
            *("--phases", "coverage,fuzzing", "--max-examples", "3", "--seed", "1"),
            *("--exclude-path-regex", "^/slackwater/instances"),  # these start and stop processes
            *("--report", "json", "--report-json-path", str(report)),
            *("--suppress-health-check", "all", "--request-timeout", "60", "--no-color"),
        ],
        cwd=tmp_path,
        env=os.environ
        | {
            "PYTHONPATH": str(Path(__file__).parent),
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "SCHEMATHESIS_REAL_VALUES": json.dumps(real),
        },
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert attack.returncode == 0, attack.stdout[-5000:] + attack.stderr[-2000:]
    assert json.loads(report.read_text())["test_cases"]["generated"] > 1000
    assert service.get("/healthz").status_code == 200


def test_slow_clients_are_cut_off_and_others_were_served_meanwhile(
    service: ServiceProcess, slow_clients: SlowClients
) -> None:
    assert service.get("/healthz").status_code == 200
    for thread in slow_clients.threads:
        thread.join(130)
    assert slow_clients.hung_up == {"head", "body"}
