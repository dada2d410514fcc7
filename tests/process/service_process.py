"""A real service in a process of its own, for tests: started, killed, started again, stopped."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from harness import forked_service

READY_S = 240.0


def wait_for(what: str, ready: Callable[[], bool], limit_s: float = READY_S) -> None:
    """Poll until `ready`, less often when it takes long; fail with `what` after `limit_s`."""
    deadline_s, pause_s = time.monotonic() + limit_s, 0.02
    while not ready():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {limit_s:g} s for {what}")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.1)  # each poll costs the service some milliseconds


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked how yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextlib.contextmanager
def sdk_clients_closed() -> Iterator[None]:
    """Close every session that the SDK opens inside, whoever asked for it: each sends heartbeats
    from a thread.
    """
    from tinker.lib.internal_client_holder import InternalClientHolder

    made: list[InternalClientHolder] = []
    begin = InternalClientHolder.__init__

    def remembered(self: InternalClientHolder, *arguments: Any, **options: Any) -> None:
        made.append(self)  # also if it fails half-way
        begin(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InternalClientHolder, "__init__", remembered)
        yield
    for holder in made:
        with contextlib.suppress(RuntimeError):  # it is closed already
            holder.close()


_SENDERS = ("_session_heartbeat", "_periodic_flush", "_config_refresh_loop", "_cancel_drain_loop")


def living_sdk_sessions() -> "list[asyncio.Task[Any]]":
    """Heartbeats and telemetry of this process that are still sent, and sessions that are being
    closed, which may say that nobody takes their last words.
    """
    from tinker.lib.internal_client_holder import _internal_client_holder_thread_singleton

    tasks = asyncio.all_tasks(_internal_client_holder_thread_singleton.get_loop())
    return [
        task
        for task in tasks
        if any(name in repr(task.get_coro()) for name in (*_SENDERS, "_async_cleanup"))
    ]


def sdk_sessions_ended() -> bool:
    """Whether none is left. What was cancelled in the middle of a request may have missed it, and
    the session that is being closed waits for it without end: it is cancelled again.
    """
    living = living_sdk_sessions()
    for task in living:
        if any(name in repr(task.get_coro()) for name in _SENDERS):
            task.get_loop().call_soon_threadsafe(task.cancel)
    return not living


class ServiceProcess:
    """`slackwater up` on a folder with one model; `port` stays the same over restarts."""

    running: ClassVar["dict[Path, ServiceProcess]"] = {}

    def __init__(
        self, state: Path, model: Path, port: int, *options: str, name: str = "tiny"
    ) -> None:
        self.state = state
        self._command = ["up", "--state", str(state), "--port", str(port)]
        self._command += ["--model", f"{name}={model}", *options]
        self.process: subprocess.Popen[bytes] | None = None
        self.url = f"http://127.0.0.1:{port}"
        self.key = ""
        # One for all questions, since making one reads every certificate; a connection each, since
        # services are killed.
        self._http = httpx.Client(
            base_url=self.url, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def start(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        with (self.state / "up.log").open("ab") as log:
            command = ["slackwater", *self._command]
            self.process = forked_service.programs().start(forked_service.__name__, command, log)
        self.running[self.state] = self
        wait_for("the service", self._serves)
        self.key = json.loads((self.state / "server.json").read_text())["key"]

    def _serves(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.state / "up.log").read_text()
        try:
            return self._http.get("/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path, headers={"x-api-key": self.key}, timeout=READY_S)

    def post(self, path: str, body: object, key: str | None = None) -> httpx.Response:
        headers = {"x-api-key": self.key if key is None else key}
        return self._http.post(path, json=body, headers=headers, timeout=READY_S)

    def key_of(self, tenant: str) -> str:
        keys: dict[str, str] = json.loads((self.state / "keys.json").read_text())
        return next(key for key, name in keys.items() if name == tenant)

    def status(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = self.get("/slackwater/status").json()
        return found

    def wait_for_workers(self) -> None:
        """Until one engine and one trainer have joined."""

        def joined() -> bool:
            gauges = self.status()["gauges"]
            return gauges["engines"] > 0 and gauges["trainers"] > 0

        wait_for("the workers", joined)

    def kill_worker(self, role: str) -> None:
        """SIGKILL a worker of a role, as soon as there is one: the service itself may be down just
        now.
        """
        wait_for(f"a {role} to kill", lambda: self._killed(role))

    def _killed(self, role: str) -> bool:
        try:
            pids = self.status()["pids"]
        except httpx.HTTPError:
            return False
        for name, pid in pids.items():
            if name.startswith(role):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return True
        return False

    def kill(self) -> None:
        """SIGKILL the service itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(READY_S)

    def account(self) -> str:
        """Its last words, and where its jobs stand: for whoever reads of a test that failed."""
        logs = [self.state / "up.log", self.state / "logs" / "service.log"]
        said = [line for log in logs if log.exists() for line in log.read_text().splitlines()[-30:]]
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
            rows = self.get("/slackwater/jobs").json()["jobs"]
            said += [f"{row['job']}: {row['stage']}: {row['reason']}" for row in rows]
        return "\n".join(said)

    def stop(self) -> int:
        assert self.process is not None
        self.running.pop(self.state, None)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(READY_S)
