"""A running service whose instances come and go: its clients need not know."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.ports import free_port
from slackwater.cli import instance as instance_command

from .service_process import ServiceProcess, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def elastic(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    state = tmp_path_factory.mktemp("elastic") / "state"
    options = ("--tenant", "operator", "--tenant", "guest", "--record", str(state / "record"))
    service = ServiceProcess(state, tiny_model, free_port(), *options)
    service.start()
    service.wait_for_workers()
    yield service
    service.stop()
    replayed_record_gives_the_same_commands(state / "record.fleet.jsonl")


def replayed_record_gives_the_same_commands(record: Path) -> None:
    """All that happened in this module, fed to a fresh manager."""
    checked = CliRunner().invoke(instance_command.app, ["verify", "--json", str(record)])
    found = json.loads(checked.output)
    assert found["first_divergence"] is None
    assert found["events_agreed"] > 500


def instances(service: ServiceProcess) -> dict[str, dict[str, Any]]:
    found = service.get("/slackwater/instances").json()["instances"]
    return {row["instance"]: row for row in found}


def ready(service: ServiceProcess) -> set[str]:
    return {name for name, row in instances(service).items() if row["state"] == "ready"}


def completion(service: ServiceProcess, seed: int, tokens: int) -> list[int]:
    body = {
        "model": "tiny",
        "prompt": [65, 66, 67, 68 + seed],
        "max_tokens": tokens,
        "seed": seed,
        "return_token_ids": True,
    }
    answer = service.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def completions(service: ServiceProcess, tokens: int = 400) -> list[list[int]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda seed: completion(service, seed, tokens), range(8)))


def test_requests_outlive_the_instances_that_run_them(elastic: ServiceProcess) -> None:
    wanted = completions(elastic)
    wish = {"count": 1, "kind": "dedicated"}
    (added,) = elastic.post("/slackwater/instances", wish).json()["added"]
    wait_for("the new instance", lambda: added in ready(elastic))
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(completions, elastic)
        wait_for("work on it", lambda: instances(elastic)[added].get("running", 0) > 0)
        assert elastic.post(f"/slackwater/instances/{added}/kill", {}).status_code == 202
        assert under_way.result() == wanted
    wait_for("its end", lambda: added not in instances(elastic))


def test_the_last_kept_engine_can_be_drained_once_another_is_there(elastic: ServiceProcess) -> None:
    (kept,) = ready(elastic)
    runner = CliRunner()
    state = ["--state", str(elastic.state)]
    assert runner.invoke(instance_command.app, ["add", *state]).exit_code == 0
    wait_for("the new instance", lambda: len(ready(elastic)) == 2)
    drained = runner.invoke(instance_command.app, ["drain", kept, "--move-turns", *state])
    assert drained.exit_code == 0, drained.output
    wait_for("its end", lambda: kept not in instances(elastic))
    assert len(completion(elastic, 1, 8)) == 8
    shown = runner.invoke(instance_command.app, ["list", "--json", *state])
    assert '"kind": "spot"' in shown.output
    assert kept not in shown.output


def test_wrong_wishes_are_refused_and_change_nothing(elastic: ServiceProcess) -> None:
    before = set(instances(elastic))
    path = "/slackwater/instances"
    assert elastic.post(path, {"count": 0}).status_code == 422
    assert elastic.post(path, {"kind": "local"}).status_code == 422
    assert elastic.post(path, {"model": "nobody"}).status_code == 404
    assert elastic.post(path, {"url": "http://127.0.0.1:1"}).status_code == 422
    assert elastic.post(f"{path}/nobody/kill", {}).status_code == 404
    assert elastic.post(f"{path}/replay", {"trace": "a,b\n1,2"}).status_code == 422
    guest = elastic.key_of("guest")
    assert elastic.post(path, {"count": 1}, key=guest).status_code == 400
    assert set(instances(elastic)) == before


def test_a_vllm_server_that_is_not_there_is_reported(elastic: ServiceProcess) -> None:
    wish = {"engine": "vllm", "url": "ftp://nowhere"}
    assert elastic.post("/slackwater/instances", wish).status_code == 422
    missing = {"engine": "vllm"}
    answer = elastic.post("/slackwater/instances", missing)
    assert answer.status_code == 422
    assert "SLACKWATER_VLLM" in answer.text


def test_the_learner_begins_on_whole_groups_while_the_rest_roll_out(
    elastic: ServiceProcess, tmp_path: Path
) -> None:
    import tinker

    from slackwater.rl.grpo import run
    from slackwater.rl.recipe import load_recipe
    from slackwater.rl.run_directory import RunDirectory

    changes = ["grpo.steps=3", "grpo.groups=24", "grpo.max_groups=24", "grpo.overlap=16"]
    changes += ["grpo.dynamic_sampling=false", "warm_up.steps=5", "sampling.max_tokens=48"]
    recipe = load_recipe("copy-digits", changes)
    folder = RunDirectory(tmp_path / "run", recipe)
    service = tinker.ServiceClient(base_url=elastic.url, api_key=elastic.key)
    seen: list[dict[str, float]] = []
    run(recipe, service, folder, lambda step, metrics: seen.append(metrics))
    folder.close()
    assert len(seen) == 3
    trained = [row for row in seen if row["optim/updates"]]
    assert trained, "no group had differing rewards"
    assert all(row["optim/updates"] == 1 for row in trained)
    assert any(row["optim/passes"] > 1 and row["time/overlap_s"] > 0 for row in trained)
    assert all(abs(row["optim/sampler_kl"]) < 1e-2 for row in trained), "not one weight version"


def test_a_listed_instance_comes_back_when_it_is_killed(tiny_model: Path, tmp_path: Path) -> None:
    listed = tmp_path / "instances.toml"
    listed.write_text('[[instances]]\nname = "mine"\n')
    options = ("--engines", "0", "--instances", str(listed))
    service = ServiceProcess(tmp_path / "state", tiny_model, free_port(), *options)
    service.start()
    try:
        wait_for("the listed instance", lambda: ready(service) == {"mine"})
        wanted = completion(service, 1, 8)
        before = instances(service)["mine"]["pid"]
        assert service.post("/slackwater/instances/mine/kill", {}).status_code == 202

        def is_back() -> bool:
            row = instances(service).get("mine", {})
            return row.get("state") == "ready" and row["pid"] != before

        wait_for("its return", is_back)
        assert completion(service, 1, 8) == wanted
    finally:
        service.stop()
