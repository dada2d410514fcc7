"""A served model with a promise, from a fresh folder as a user starts it: a replayed load beside a
job that rolls out.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from slackwater.zoo.tiny import make_model

from .service_process import ServiceProcess, wait_for

pytestmark = pytest.mark.process

_REQUESTS = 10


def roll_out(service: ServiceProcess, job: str, answers: list[int]) -> None:
    """One request of a job for the other model, long enough that a device is lent for it."""
    answer = httpx.post(
        f"{service.url}/v1/completions",
        json={
            "model": "tiny",
            "prompt": [20, 30, 40],
            "max_tokens": 250,
            "n": 12,
            "ignore_eos": True,
        },
        headers={"x-api-key": service.key, "x-slackwater-job": job},
        timeout=240,
    )
    answers.append(answer.status_code)


def replay(service: ServiceProcess, trace: Path) -> dict[str, Any]:
    """In a process of its own, as a user would."""
    command = [sys.executable, "-m", "slackwater", "bench", "replay", "--json", "--model", "chat"]
    command += ["--url", service.url, "--key", service.key, "--trace", str(trace)]
    command += ["--duration", "3", "--slo", "ttft=60,tpot=20"]
    done = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()
    figures: dict[str, Any] = json.loads(done.stdout)["figures"]
    return figures


def rows_of_trace(trace: Path) -> list[str]:
    return trace.read_text().splitlines()


@pytest.mark.timeout(900)
def test_users_are_answered_and_counted_while_a_job_borrows_the_device_and_gives_it_back(
    new_service: Callable[..., ServiceProcess], tmp_path: Path
) -> None:
    make_model("tiny", tmp_path / "chat", seed=5)
    trace = tmp_path / "trace.csv"
    rows = [f"{0.25 * number},{10 + number},{3 + number}" for number in range(_REQUESTS)]
    trace.write_text("\n".join(["t_s,prompt_tokens,output_tokens", *rows]) + "\n")
    service = new_service(
        *("--serve", f"chat={tmp_path / 'chat'}", "--slo", "ttft=60,tpot=20"),
        *("--lend", "--kv-mb", "32"),
    )
    service.start()
    wait_for("both engines", lambda: service.status()["gauges"]["engines"] == 2)

    def lent() -> list[str]:
        found: dict[str, Any] = service.get("/slackwater/status").json()["serving"]
        return list(found["lent"].values())

    answers: list[int] = []
    rolling = threading.Thread(target=roll_out, args=(service, "mine", answers))
    rolling.start()
    wait_for("a device to be lent", lambda: lent() == ["default/mine"])
    figures = replay(service, trace)
    rolling.join(240)
    assert answers == [200]
    assert (figures["requests"], figures["failed"]) == (_REQUESTS, 0)
    assert figures["tokens"] == sum(3 + number for number in range(_REQUESTS))
    assert set(figures["attainment_by_minute"]) == {1.0}
    wait_for("the device to be given back", lambda: lent() == [])
    serving = service.get("/slackwater/status").json()["serving"]
    assert sum(minute["requests"] for minute in serving["minutes"]) == _REQUESTS
    assert {minute["attainment"] for minute in serving["minutes"]} == {1.0}
    header, *seen = service.get("/slackwater/traces/served").text.splitlines()
    assert header == rows_of_trace(trace)[0] and len(seen) == _REQUESTS
    asked = sorted(row.split(",", 1)[1] for row in rows_of_trace(trace)[1:])
    assert sorted(row.split(",", 1)[1] for row in seen) == asked  # the trace of a week, as it came
    metrics = service.get("/metrics").text
    assert "slackwater_serving_slo_attainment_last_minute" in metrics
    assert "slackwater_serving_worker_slo_attainment_last_minute" in metrics
