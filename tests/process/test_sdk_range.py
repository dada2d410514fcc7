"""Older releases of the `tinker` SDK against a real service; `make sdk-range` fetches them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .service_process import ServiceProcess

pytestmark = pytest.mark.process

PROBE = Path(__file__).parent / "compatibility" / "sdk_probe.py"
FOLDER = os.environ.get("SLACKWATER_OLD_SDKS")


def versions() -> list[str]:
    """One folder a version, as `pip install --target` makes it."""
    return sorted(path.name for path in Path(FOLDER).iterdir()) if FOLDER else ["none"]


@pytest.mark.skipif(not FOLDER, reason="make sdk-range fetches older SDKs")
@pytest.mark.parametrize("version", versions())
def test_an_older_sdk_trains_samples_and_saves(service: ServiceProcess, version: str) -> None:
    known = {"PYTHONPATH": f"{FOLDER}/{version}", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(PROBE), service.url, service.key],
        env=os.environ | known,
        capture_output=True,
        text=True,
        timeout=600,
    )
    calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [call for call in calls if "error" in call] == []
    assert (done.returncode, len(calls) >= 15) == (0, True), done.stdout + done.stderr
