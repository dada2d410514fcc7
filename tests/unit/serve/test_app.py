"""The HTTP face over a real control plane that has no workers: everything but the arithmetic."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx

from harness.service_plane import with_plane
from slackwater.control.operations.settings import OperationsConfig
from slackwater.model.ids import ModelId, RequestId, TenantId, WorkerId
from slackwater.model.operation import Operation, OpKind
from slackwater.model.session import LoraShape
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.store.checkpoints import Checkpoint, put_checkpoint
from slackwater.runtime.store.operation_log import Submission, add_operation
from slackwater.runtime.store.outcomes import RequestOutcome
from slackwater.wire import messages
from slackwater.wire.frames import FrameDecoder
from slackwater.wire.memory import MEMORY_GAUGE


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def open_model(client: httpx.AsyncClient) -> tuple[str, str, str]:
    """Session, model and the request that creates the model."""
    session = (await post(client, "create_session", sdk_version="0", user_metadata=None))[
        "session_id"
    ]
    made = await post(
        client,
        "create_model",
        session_id=session,
        model_seq_id=0,
        base_model="tiny",
        lora_config={"rank": 4},
    )
    return session, made["model_id"], made["request_id"]


def test_a_request_that_is_not_done_is_a_quiet_408_and_stays_after_a_restart(
    tmp_path: Path,
) -> None:
    kept: list[str] = []

    async def before(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session, model, request = await open_model(client)
        again = await post(
            client,
            "create_model",
            session_id=session,
            model_seq_id=0,
            base_model="tiny",
            lora_config={"rank": 4},
        )
        assert again == {"request_id": request, "model_id": model}
        kept.append(request)

    async def pending(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        answer = await client.post("retrieve_future", json={"request_id": kept[0]})
        assert answer.status_code == 408
        assert answer.json()["type"] == "try_again"

    with_plane(tmp_path, before)
    with_plane(tmp_path, pending)


def test_keys_and_tenants_are_checked_on_every_id(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, request = await open_model(client)
        stranger = {"x-api-key": plane.tenants.key_of("other")}
        for path, body in (
            ("retrieve_future", {"request_id": request}),
            ("get_info", {"model_id": model}),
            ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}),
        ):
            assert (await client.post(path, json=body, headers=stranger)).status_code == 404
            assert (
                await client.post(path, json=body, headers={"x-api-key": ""})
            ).status_code == 401
        bearer = {"x-api-key": "", "authorization": "Bearer nothing"}
        refused = await client.get("http://test/v1/models", headers=bearer)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"

    with_plane(tmp_path, work)


def test_a_body_that_fails_validation_uses_up_its_number(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, _ = await open_model(client)
        step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": -1}}
        refused = await client.post("optim_step", json=step)
        assert refused.status_code == 422
        assert "learning_rate" in refused.json()["detail"]
        assert int(refused.headers["content-length"]) > 0
        again = await client.post("optim_step", json=step | {"adam_params": {}})
        assert again.status_code == 400
        assert "seq_id: 1" in again.json()["detail"]

    with_plane(tmp_path, work)


def test_a_silent_session_ends_and_takes_its_models_with_it(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session, model, request = await open_model(client)
        await asyncio.sleep(0.02)
        running = asyncio.create_task(plane.housekeeping.run())
        outcome = await plane.outcome(TenantId("mine"), request, 240.0)  # type: ignore[arg-type]
        plane.housekeeping.stop()
        await running
        assert outcome is not None
        assert "no heartbeat" in str(outcome.error)
        gone = await client.post("session_heartbeat", json={"session_id": session})
        assert gone.status_code == 410
        assert (await client.post("get_info", json={"model_id": model})).status_code == 404

    with_plane(tmp_path, work, session_silent_after_s=0.01)


def wait_until_gone(folder: Path) -> None:
    deadline_s = time.monotonic() + 60
    while folder.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_checkpoints_past_their_time_go_with_their_files(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, _ = await open_model(client)
        folder = plane.state.checkpoint(ModelId(model), "old", 3)
        folder.mkdir(parents=True)
        held = Checkpoint(
            f"tinker://{model}/weights/old",
            TenantId("mine"),
            ModelId(model),
            kind="weights",
            name="old",
            base_model="tiny",
            lora=LoraShape(4),
            held_as=plane.state.uri(folder),
            lineage="l",
            size_bytes=1,
            created_s=1.0,
            expires_s=2.0,
            public=False,
            user_metadata=None,
        )
        await plane.store.call(lambda c: put_checkpoint(c, held))
        running = asyncio.create_task(plane.housekeeping.run())
        await asyncio.to_thread(wait_until_gone, folder)
        plane.housekeeping.stop()
        await running
        assert (await client.get("checkpoints")).json()["checkpoints"] == []

    with_plane(tmp_path, work)


def test_samples_are_checked_before_they_are_taken(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session, _, _ = await open_model(client)
        opened = await post(
            client,
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        sampler = opened["sampling_session_id"]

        async def said(**changed: Any) -> str:
            tokens = changed.pop("tokens", [1, 2])
            body = {
                "sampling_session_id": sampler,
                "seq_id": 0,
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
                **changed,
            }
            answer = await client.post("asample", json=body)
            return f"{answer.status_code} {answer.json().get('error', '')}"

        assert await said(tokens=[]) == "422 prompt: '[]' must hold at least one token"
        assert "300 must be below 300" in await said(tokens=[300])
        assert "must be below 64" in await said(tokens=[1] * 64)
        assert "temperature" in await said(sampling_params={"temperature": -1})
        assert "not supported" in await said(record_stability_info=True)
        target = {"data": [1, 2], "dtype": "int64", "shape": [2, 1]}
        assert "shape [1, K]" in await said(target_prompt_logprobs=target)
        target = {"data": [300], "dtype": "int64", "shape": [1, 1]}
        assert "300 must be below 300, or -1" in await said(target_prompt_logprobs=target)
        assert "Extra inputs" in await said(surprise=1)
        assert (await said()).startswith("200")
        assert "sent before with another request" in await said(tokens=[7])

    with_plane(tmp_path, work)


def test_a_number_far_ahead_is_a_clear_error_and_uses_up_nothing(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, _ = await open_model(client)
        far = {"model_id": model, "seq_id": 2**31 - 1, "adam_params": {}}
        wrong = far | {"adam_params": {"learning_rate": "fast"}}
        for body, said in ((far, "seq_id: 2147483647 must be at most 16384"), (wrong, "learning")):
            refused = await client.post("optim_step", json=body)
            assert refused.status_code == 422
            assert said in refused.json()["error"]
        assert plane.controller.operations.waiting()[ModelId(model)] == 1
        step = {"model_id": model, "seq_id": 1, "adam_params": {}}
        await post(client, "optim_step", **step)
        assert plane.controller.operations.waiting()[ModelId(model)] == 2

    with_plane(tmp_path, work)


def test_a_durable_log_with_a_number_far_ahead_opens_and_goes_on(tmp_path: Path) -> None:
    kept: list[str] = []

    async def before(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        _, model, _ = await open_model(client)
        kept.append(model)
        far = Operation(RequestId("op-far"), ModelId(model), 2**31 - 1, OpKind.OPTIM_STEP)
        new = Submission(far, TenantId("mine"), b"", time.time())
        await plane.store.call(lambda c: add_operation(c, new))

    async def after(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        assert plane.controller.operations.waiting()[ModelId(kept[0])] == 2
        await asyncio.sleep(0)
        for _ in range(200):
            answer = await client.get("http://test/healthz")
            assert answer.status_code == 200
            await asyncio.sleep(0.001)

    with_plane(tmp_path, before)
    with_plane(tmp_path, after, operations=OperationsConfig(give_up_gap_after_s=0.05))


def test_any_number_of_results_can_be_acknowledged_at_once(tmp_path: Path) -> None:
    """A database takes only so many values in one statement; more than that must not stop the
    service.
    """

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session, _, _ = await open_model(client)
        opened = await post(
            client,
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        target = {"sampling_session_id": opened["sampling_session_id"]}
        names = [f"sm-{number}" for number in range(40_000)]
        await post(client, "retrieve_futures", target=target, retrieved_request_ids=names)
        many = await client.post(
            "retrieve_futures", json={"target": target, "retrieved_request_ids": names * 2}
        )
        assert many.status_code == 422
        assert "retrieved_request_ids" in many.json()["error"]

    with_plane(tmp_path, work)


FLEET_SERIES = {
    "slackwater_loop_longest_cpu_s",
    "slackwater_loop_longest_lag_s",
    "slackwater_engines",
    "slackwater_trainers",
    "slackwater_nodes",
    "slackwater_sandboxes",
    "slackwater_rollout_instances",
}


def test_metrics_show_strangers_the_fleet_tenants_their_own_and_the_operator_everything(
    tmp_path: Path,
) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        other = plane.tenants.key_of("other")
        for number, tenant in enumerate(("mine", "other")):
            plane.board.expect(RequestId(f"op-{number}"), TenantId(tenant))
            plane.board.settle(RequestId(f"op-{number}"), RequestOutcome("optim_step", b"{}"))
            headers = {"x-api-key": plane.tenants.key_of(tenant), "x-slackwater-job": "secret-run"}
            await client.post("create_session", json={"sdk_version": "0"}, headers=headers)
        plane.rollout.gauges[WorkerId("engine-0")] = {"running": 1.0}

        async def series(key: str) -> list[str]:
            answer = await client.get("http://test/metrics", headers={"x-api-key": key})
            assert answer.status_code == 200
            return [line for line in answer.text.splitlines() if not line.startswith("#")]

        for key in ("", "tml-unknown"):
            assert {line.split()[0] for line in await series(key)} == FLEET_SERIES
        theirs = [line for line in await series(other) if line.split()[0] not in FLEET_SERIES]
        assert any(
            line.startswith('slackwater_job_total{job="other/secret-run"') for line in theirs
        )
        assert any(line.startswith("slackwater_request_seconds_count") for line in theirs)
        assert all('tenant="other"' in line for line in theirs), theirs
        job_key = plane.tenants.job_key(TenantId("mine"), "secret-run")
        for line in await series(job_key):
            assert line.split()[0] in FLEET_SERIES or 'tenant="mine"' in line
        whole = await series(plane.tenants.key_of("mine"))
        for part in ('tenant="other"', 'tenant="mine"', 'worker="engine-0"', "active_sessions 2.0"):
            assert any(part in line for line in whole), part
        status = await client.get("http://test/slackwater/status", headers={"x-api-key": other})
        assert "active_sessions" not in status.json()["gauges"]
        assert "rollout_accepted_tokens" not in status.json()["gauges"]

    with_plane(tmp_path, work)


def test_the_memory_of_each_worker_is_told_to_the_operator_alone(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        worker = WorkerId("t0.trainer-0.1")
        plane.workers.worker_joined(messages.Hello(worker, "trainer"))
        beat = messages.encode(messages.Heartbeat({MEMORY_GAUGE: 512e6}))
        plane.workers.handle_frames(worker, FrameDecoder().feed(beat))
        mine = (await client.get("http://test/metrics")).text
        family = "slackwater_worker_memory_bytes"
        assert f'{family}{{worker="{worker}"}} 5.12e+08' in mine
        own = re.search(rf'{family}{{worker="plane"}} (\S+)', mine)
        assert own is not None and float(own[1]) > 1e6
        other = {"x-api-key": plane.tenants.key_of("other")}
        assert family not in (await client.get("http://test/metrics", headers=other)).text
        plane.workers.worker_lost(worker, "it ended")
        assert worker not in (await client.get("http://test/metrics")).text

    with_plane(tmp_path, work)


def test_what_users_asked_for_last_week_is_told_to_the_operator_alone(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        where = "http://test/slackwater/traces"
        plane.traces.record_served(1.0, 7, 3)
        assert (await client.get(f"{where}/served")).text.splitlines()[1:] == ["0.000,7,3"]
        for key in (
            plane.tenants.key_of("other"),
            plane.tenants.job_key(TenantId("mine"), "digits"),  # a driver of the operator's own
        ):
            answer = await client.get(f"{where}/served", headers={"x-api-key": key})
            assert answer.status_code == 400 and "operator's" in answer.text
        stranger = await client.get(f"{where}/spot", headers={"x-api-key": "guess"})
        assert stranger.status_code == 401
        for kind in ("keys.json", "..%2f..%2fkeys.json", "served-2026-01-01"):
            assert (await client.get(f"{where}/{kind}")).status_code in (404, 422)

    with_plane(tmp_path, work)


def test_only_ones_own_requests_can_be_cancelled(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session, _, request = await open_model(client)
        opened = await post(
            client,
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        sample = await post(
            client,
            "asample",
            sampling_session_id=opened["sampling_session_id"],
            seq_id=0,
            prompt={"chunks": [{"tokens": [3]}]},
            sampling_params={"max_tokens": 1},
        )
        body = {"request_id": sample["request_id"]}
        other = {"x-api-key": plane.tenants.key_of("other")}
        foreign = await client.post("cancel_future", json=body, headers=other)
        unknown = await client.post("cancel_future", json={"request_id": "sm-0"})
        assert (foreign.status_code, unknown.status_code) == (404, 404)
        for name in (sample["request_id"], sample["request_id"], request):
            answer = await client.post("cancel_future", json={"request_id": name})
            assert answer.status_code == 204, answer.text
        ended = await client.post("retrieve_future", json=body)
        assert "cancelled" in ended.json()["error"]

    with_plane(tmp_path, work)


def test_a_download_link_is_its_whole_path(tmp_path: Path) -> None:
    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        session, _, _ = await open_model(client)
        url = (await client.get(f"sessions/{session}/trace_export")).json()["url"]
        assert (await client.get(f"sessions/{session}/trace_export")).json()["url"] == url
        whole = await client.get(url)
        assert whole.status_code == 200
        assert f"{session}.json" in whole.headers["content-disposition"]
        for wrong in (url + "x", url.rpartition("/")[0] + "/model.safetensors"):
            assert (await client.get(wrong)).status_code == 404

    with_plane(tmp_path, work)


def test_the_dashboard_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    shown = (Path(__file__).parents[3] / "docs" / "reference" / "grafana.json").read_text()
    asked = set(re.findall(r"slackwater_[a-z_]+", " ".join(re.findall(r'"expr": (.*)', shown))))

    async def work(plane: ControlPlane, client: httpx.AsyncClient) -> None:
        text = (await client.get("http://test/metrics")).text
        families = set(re.findall(r"# TYPE (\S+) ", text))
        for name in asked:
            assert name.removesuffix("_bucket") in families, name

    with_plane(tmp_path, work)
