"""What a quiet tenant's actions take while a loud one floods the broker: alone, and beside each
attack of `loud.ACTION_ATTACKS`.

A service with a sandbox and nothing else for each attack, since what the loud tenant asked for goes
on waiting when it has left. The quiet tenant runs one `true` after the other, each in a fresh
environment, and waits for its outcome. "Alone" is that before the attack begins, on the same
service.

`action_<attack>_alone_p99_ms`, `action_<attack>_p99_ms` and their ratio `_p99_ratio`;
`action_p99_over_alone` is the largest. `action_requests_failed` must be 0.
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np

from benchmarks.options import BenchOptions
from benchmarks.service.loud import ACTION_ATTACKS, Attack
from slackwater.model.errors import UnavailableError

if TYPE_CHECKING:
    from benchmarks.service.tenants import TwoTenants

_QUIET_ACTION = {"command": ["true"], "wait_s": 30}
_SETTLED_S = 3.0  # so long the flood grows before anything is measured
_SANDBOX_S = 60.0


def action_figures(options: BenchOptions, requests: int) -> dict[str, float]:
    figures: dict[str, float] = {"action_requests_failed": 0.0}
    for number, name in enumerate(ACTION_ATTACKS):
        options.progress(f"actions beside {name}", number / len(ACTION_ATTACKS))
        # Root runs actions as other users, who must be able to enter the environments.
        folder = Path(tempfile.mkdtemp(prefix="slackwater-tenants-", dir="/var/tmp"))
        folder.chmod(0o755)
        try:
            figures.update(_beside(name, folder, requests, figures))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    ratios = [figures[f"action_{name}_p99_ratio"] for name in ACTION_ATTACKS]
    return {**figures, "action_p99_over_alone": max(ratios)}


def _beside(name: str, folder: Path, requests: int, figures: dict[str, float]) -> dict[str, float]:
    from benchmarks.service.tenants import TwoTenants

    (folder / "state").mkdir()
    options = ["--engines", "0", "--trainers", "0", "--sandboxes", "1"]
    options += ["--sandbox-folder", str(folder / "sandbox")]
    with (
        TwoTenants(folder / "state", None, *options) as service,
        service.client("quiet") as quiet,
    ):
        _wait_for_sandbox(service)
        action_latencies(quiet, 10)
        alone_s, missed = action_latencies(quiet, requests)
        with Attack(service.url, service.key("loud"), name):
            time.sleep(_SETTLED_S)
            beside_s, failed = action_latencies(quiet, requests)
    alone_ms, beside_ms = (float(np.percentile(s, 99)) * 1e3 for s in (alone_s, beside_s))
    return {
        "action_requests_failed": figures["action_requests_failed"] + missed + failed,
        f"action_{name}_alone_p99_ms": alone_ms,
        f"action_{name}_p99_ms": beside_ms,
        f"action_{name}_p99_ratio": beside_ms / alone_ms,
    }


def action_latencies(client: httpx.Client, requests: int) -> tuple[list[float], int]:
    """Seconds of each of the quiet tenant's actions, and how many did not run to their end."""
    taken_s, failed = [], 0
    for _ in range(requests):
        began_s = time.perf_counter()
        answer = client.post("/slackwater/actions", json=_QUIET_ACTION)
        taken_s.append(time.perf_counter() - began_s)
        failed += answer.status_code != 200 or answer.json()["outcome"] != "done"
    return taken_s, failed


def _wait_for_sandbox(service: "TwoTenants") -> None:
    deadline_s = time.monotonic() + _SANDBOX_S
    with service.client("quiet") as client:
        while time.monotonic() < deadline_s:
            if client.get("/slackwater/actions").json()["gauges"]["sandboxes"]:
                return
            time.sleep(0.1)
    raise UnavailableError(f"no sandbox came within {_SANDBOX_S:g} s")
