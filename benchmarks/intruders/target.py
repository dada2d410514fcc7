"""A service under attack: its tenants' calls, its processes, and whether it still serves others."""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from harness.own_actions import own_actions
from slackwater.sandbox import process_tree

OPERATOR, INTRUDER, VICTIM = "operator", "team", "team.ml"
SERVES_WITHIN_S = 90.0


class Target:
    """`state` is the service's folder, whose place the intruder knows."""

    def __init__(self, url: str, state: Path) -> None:
        self.url, self.state = url, state
        keys: dict[str, str] = json.loads((state / "keys.json").read_text())
        self.keys = {tenant: key for key, tenant in keys.items()}
        self.http = httpx.Client(base_url=url, timeout=60.0)

    def call(self, tenant: str, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"x-api-key": self.keys[tenant]}
        return self.http.request(method, f"/slackwater/{path}", json=body or None, headers=headers)

    def run(self, tenant: str, *command: str, **given: Any) -> dict[str, str]:
        """One action to its end; a refusal has no `stdout`."""
        answer = self.call(tenant, "POST", "actions", command=list(command), wait_s=10, **given)
        deadline_s = time.monotonic() + SERVES_WITHIN_S
        while answer.status_code == 202 and time.monotonic() < deadline_s:
            name = answer.json()["action"]
            answer = self.call(tenant, "GET", f"actions/{name}?wait_s=5")
        found = answer.json() if answer.status_code == 200 else {}
        told = {"stdout": "", "end": "refused", "reason": answer.text, **found}
        return {name: str(told[name]) for name in ("stdout", "end", "reason")}

    def shell(self, script: str, **given: Any) -> dict[str, str]:
        return self.run(INTRUDER, "/bin/sh", "-c", script, **given)

    def open(self, tenant: str, **given: Any) -> str | None:
        answer = self.call(tenant, "POST", "environments", wait_s=30, **given)
        return str(answer.json()["environment"]) if answer.status_code == 201 else None

    def serves(self) -> bool:
        """Whether another tenant's action still runs, on the worker that was there before."""
        return self.run(VICTIM, "/bin/echo", "fine")["stdout"] == "fine\n"

    def plane(self) -> int:
        """The control plane's process."""
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and {"up", str(self.state)} <= set(_words(int(entry.name))):
                    return int(entry.name)
        raise ProcessLookupError(f"no service runs on {self.state}")

    def processes(self) -> dict[int, list[str]]:
        """Command lines of the control plane and of all that it started."""
        return {pid: _words(pid) for pid in process_tree.subtree(self.plane())}

    def worker(self) -> int:
        """The sandbox worker: the first of its processes, which forks the others."""
        module = "slackwater.worker.sandbox_worker"
        return min(pid for pid, line in self.processes().items() if module in line)

    def hub(self) -> tuple[str, int] | None:
        """Where workers connect, as any node of the fleet knows."""
        for line in self.processes().values():
            if "--connect" in line:
                host, _, port = line[line.index("--connect") + 1].rpartition(":")
                return host, int(port)
        return None


def _words(pid: int) -> list[str]:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return line.decode(errors="replace").split("\0")


@contextlib.contextmanager
def target(folder: Path, backend: str, *options: str) -> Iterator[Target]:
    """A service with three tenants and one sandbox."""
    tenants = [word for name in (OPERATOR, INTRUDER, VICTIM) for word in ("--tenant", name)]
    state, places = folder / "state", folder / "sandboxes"
    more = ("--sandbox-backend", backend, "--sandbox-folder", str(places), *options)
    with own_actions(state, *tenants, *more) as (url, _):
        found = Target(url, state)
        deadline_s = time.monotonic() + SERVES_WITHIN_S
        while not found.serves():
            if time.monotonic() > deadline_s:
                raise TimeoutError("no sandbox runs actions")
        yield found
