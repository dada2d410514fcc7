"""A service that cannot serve says so: at its start, or in everything that is asked of it."""

import asyncio
import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.front_end import front_end
from slackwater.runtime.plane import ControlPlane
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.state_directory import StateDirectory
from slackwater.weights.joined_file import ExportCatalog

from .service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.process


def up(state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slackwater", "up", "--state", str(state), "--port", "0"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)


def cut_off(model: Path, into: Path) -> Path:
    shutil.copytree(model, into)
    weights = into / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return into


def test_what_cannot_be_served_is_one_line_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    shutil.copytree(tiny_model, odd)
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"model_type": "perceptron"}))
    cut = cut_off(tiny_model, tmp_path / "cut")
    cases = (
        (("--model", f"tiny={tiny_model}", "--device", "cuda:99"), "cuda:99 is not here"),
        (("--model", f"tiny={tiny_model}", "--device", "abacus"), "must be cpu, cuda"),
        (("--model", f"odd={odd}"), "perceptron"),
        (("--model", f"cut={cut}"), "cut off"),
    )
    with ThreadPoolExecutor(2) as pool:
        states = (tmp_path / f"state{number}" for number in range(len(cases)))
        starts = list(pool.map(lambda state, case: (up(state, *case[0]), case[1]), states, cases))
    for ended, said in starts:
        assert ended.returncode in (1, 2)
        assert said in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
        assert not ended.stdout


def test_an_engine_that_fails_later_shows_in_status_list_and_answers(
    tiny_model: Path, tmp_path: Path
) -> None:
    cut = cut_off(tiny_model, tmp_path / "cut")

    async def scenario() -> dict[str, Any]:
        state = StateDirectory(tmp_path / "state")
        settings = ServiceSettings(
            state=state.root, models={"cut": cut}, tenants=("default", "other")
        )
        plane = ControlPlane(settings, state, ExportCatalog(state.weights))
        await plane.start()
        keys = {name: plane.tenants.key_of(name) for name in ("default", "other")}
        found: dict[str, Any] = {}
        try:
            async with (
                front_end(plane) as app,
                httpx.AsyncClient(
                    transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=240
                ) as client,
            ):
                for name, key in keys.items():
                    headers = {"x-api-key": key}
                    body = {"model": "cut", "prompt": "a", "max_tokens": 1}
                    # Asked before anybody knows: it waits, and is told as soon as it is clear.
                    answer = await client.post("/v1/completions", json=body, headers=headers)
                    status = await client.get("/slackwater/status", headers=headers)
                    listed = await client.get("/slackwater/instances", headers=headers)
                    found[name] = (answer, status.json(), listed.json()["instances"])
        finally:
            await plane.stop()
        return found

    found = asyncio.run(scenario())
    answer, status, listed = found["default"]
    assert answer.status_code == 503
    assert "no engine starts" in answer.json()["error"]["message"]
    assert "engine-0-0" in status["failed"]
    assert [row["state"] for row in listed if row["instance"] == "engine-0-0"] == ["failed"]
    answer, status, listed = found["other"]
    assert answer.status_code == 503
    for said in (answer.text, json.dumps(status), json.dumps(listed)):
        assert str(tmp_path) not in said


def test_training_without_a_service_or_with_a_wrong_key_is_one_line(
    service: ServiceProcess, tmp_path: Path
) -> None:
    bare = {k: v for k, v in os.environ.items() if not k.startswith("TINKER")}
    known, unknown = {"TINKER_API_KEY": service.key}, {"TINKER_API_KEY": "tml-wrong"}
    cases: tuple[tuple[tuple[str, ...], dict[str, str], str], ...] = (
        (("--url", "http://127.0.0.1:9"), known, "does not answer"),
        (("--url", service.url), unknown, "is not known"),
        (("--url", service.url, "--set", "model.base=nothing"), known, "nothing"),
        (("--state", str(tmp_path / "nobody")), {}, "no service is running"),
    )

    def train(number: int) -> subprocess.CompletedProcess[str]:
        options, key, _ = cases[number]
        command = [sys.executable, "-m", "slackwater", "train", "copy-digits"]
        return subprocess.run(
            [*command, "--run", str(tmp_path / f"run{number}"), *options],
            capture_output=True,
            text=True,
            timeout=240,
            env=bare | key,
        )

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(train, range(len(cases))))
    for ended, (_, _, said) in zip(runs, cases, strict=True):
        assert ended.returncode in (1, 2)
        assert said in ended.stderr
        assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr


def test_a_tokenizer_comes_over_http_to_a_machine_that_has_none(
    service: ServiceProcess, tmp_path: Path
) -> None:
    script = """
import tinker
service = tinker.ServiceClient()
sampler = service.create_sampling_client(base_model="tiny")
tokenizer = sampler.get_tokenizer()
print(tokenizer.encode("hi"), tokenizer.chat_template is not None)
service.holder.close()
"""
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_ENDPOINT": f"{service.url}/hub",
        "HF_TOKEN": service.key,
        "TINKER_BASE_URL": service.url,
        "TINKER_API_KEY": service.key,
    }
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={k: v for k, v in environment.items() if k != "HF_HUB_OFFLINE"},
    )
    assert ended.stdout.strip() == "[104, 105] True", ended.stderr
    assert service.get("/hub/tiny/resolve/main/model.safetensors").status_code == 404
    unknown = httpx.get(f"{service.url}/hub/tiny/resolve/main/tokenizer.json", timeout=240)
    assert unknown.status_code == 401


def test_nobody_else_can_read_what_a_service_in_the_background_writes(
    tiny_model: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    command = [sys.executable, "-m", "slackwater"]
    options = ["--state", str(state)]
    started = subprocess.run(
        [*command, "up", *options, "--port", "0", "--model", f"tiny={tiny_model}", "--background"],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        assert f"stop with `slackwater down --state {state}`" in started.stdout
        assert "Ctrl-C" not in started.stdout
        assert started.stdout.endswith("ready: every worker is up\n"), started.stderr
        asked = subprocess.run(
            [*command, "status", *options, "--json"], check=True, capture_output=True, timeout=240
        )
        said = json.loads(asked.stdout)
        assert (len(said["workers"]["engine"]), len(said["workers"]["trainer"])) == (1, 1)
        wait_for("a worker's log", lambda: any((state / "logs").glob("engine-*.log")))
        for path in state.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # the database's journal comes and goes
                mode = path.stat().st_mode
                readers = stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)
                assert not readers, f"{path} can be read by others"
    finally:
        subprocess.run([*command, "down", *options], check=True, capture_output=True, timeout=240)


def test_a_head_that_is_too_large_is_refused(service: ServiceProcess) -> None:
    answer = httpx.get(
        f"{service.url}/healthz", headers={"x-large": "x" * (100 << 10)}, timeout=240
    )
    assert answer.status_code == 431
    assert "headers" in answer.json()["error"]
    assert service.get("/healthz").status_code == 200
