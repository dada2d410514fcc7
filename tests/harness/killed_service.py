"""A service whose processes are killed, and which is started again; and what is left of it when it
has been stopped.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from harness.ports import free_port
from slackwater.cli.demo import two_nodes
from slackwater.model.errors import UnavailableError

_START_S = 300.0  # a machine that does other work may take minutes
_STOP_S = 30.0
_SHARED_MEMORY = Path("/dev/shm")
SHARED = ("--set", "coschedule.placement=group", "--set", "residency.device_mb=64")


class KilledService:
    """`slackwater up`, at one port over all its lives, with some `options`.

    Without any: two nodes with a co-scheduler and state managers.
    """

    def __init__(self, folder: Path, model: Path, *, options: Sequence[str] = ()) -> None:
        self._folder, self._model = folder, model
        self._options = options or ("--fleet", str(folder / "fleet.toml"), *SHARED)
        self._state = folder / "state"
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None
        self._memory_before = _shared_memory()

    def __enter__(self) -> "KilledService":
        self._state.mkdir(parents=True)
        (self._folder / "tmp").mkdir()
        (self._folder / "fleet.toml").write_text(two_nodes())
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._client is not None:
            self._client.close()

    def start(self) -> None:
        """Also after it was killed: with what it had."""
        command = [sys.executable, "-m", "slackwater", "up", "--state", str(self._state)]
        command += ["--port", str(self._port), "--model", f"tiny={self._model}"]
        command += self._options
        environment = os.environ | {"TMPDIR": str(self._folder / "tmp")}
        with (self._folder / "up.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline_s = time.monotonic() + _START_S
        self.url = f"http://127.0.0.1:{self._port}"
        if self._client is not None:
            self._client.close()
        self._client = httpx.Client(base_url=self.url, timeout=30.0)  # 60 ms for its certificates
        while True:
            said = (self._folder / "up.log").read_text(errors="replace")[-1500:]
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise UnavailableError(f"the service did not come up: {said}")
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get("/healthz", timeout=5.0).status_code == 200:
                    break
            time.sleep(0.05)
        self.key = json.loads((self._state / "server.json").read_text())["key"]
        self._client.headers["x-api-key"] = self.key

    @property
    def pid(self) -> int:
        """Of the control plane."""
        assert self._process is not None
        return self._process.pid

    # ---- jobs ----
    def submit(self, file: dict[str, Any]) -> None:
        assert self._client is not None
        answer = self._client.post("/slackwater/jobs", json=file)
        if answer.is_error:
            raise UnavailableError(f"{file['name']}: {answer.text}")

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/slackwater/jobs/{name}")
        return found

    def curve(self, name: str) -> list[dict[str, Any]]:
        """What the driver wrote of each step, without times."""
        found = []
        for path in sorted(self._state.glob(f"jobs/*/{name}/run/metrics.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # being written just now
                    row = json.loads(line)
                    found.append({k: v for k, v in row.items() if not k.startswith("time/")})
        return found

    def key_of(self, tenant: str) -> str:
        keys: dict[str, str] = json.loads((self._state / "keys.json").read_text())
        return next(key for key, name in keys.items() if name == tenant)

    def get(self, path: str) -> Any:
        """The JSON of an answer."""
        assert self._client is not None
        return self._client.get(path).raise_for_status().json()

    # ---- kills ----
    def kill(self, victim: str, job: str) -> bool:
        """SIGKILL one; False where there is none of it just now. A control plane is started again,
        as its operator would.
        """
        if victim == "plane":
            self.kill_plane()
            self.start()
            return True
        pids = self._pids(victim, job)
        for pid in pids[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def kill_plane(self) -> None:
        """SIGKILL of the control plane, which stays down."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _pids(self, victim: str, job: str) -> list[int]:
        if victim in ("driver", "keeper"):
            driver = self.job(job).get("driver") or {}
            pid = driver.get("pid" if victim == "driver" else "keeper_pid")
            return [] if not pid else [int(pid)]
        if victim == "agent":
            nodes = self.get("/slackwater/nodes")["nodes"]
            found = [int(node["agent_pid"]) for node in nodes if "agent_pid" in node]
            return random.Random(job).sample(found, len(found))
        pids = self.get("/slackwater/status")["pids"]
        return [int(pid) for name, pid in sorted(pids.items()) if victim in name]

    # ---- what is left ----
    def drivers_left(self, names: Iterable[str]) -> list[str]:
        """Processes of jobs that are over; they may take a moment to end."""
        wanted = [f"SLACKWATER_JOB={name}\0".encode() for name in names]
        return _settled(lambda: [p for p in _processes() if any(w in p[1] for w in wanted)])

    def left_behind(self) -> list[str]:
        """Of a service that was stopped: processes, its port, shared memory, files in the temporary
        folder.
        """
        mark = str(self._folder).encode()
        left = _settled(lambda: [p for p in _processes() if mark in p[1]])
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self._port))
            except OSError:
                left.append(f"port {self._port}")
        memory = _shared_memory() - self._memory_before - _mapped()  # a living process is not ours
        left += [f"shared memory {name}" for name in sorted(memory)]
        # torch makes a cache there that is nobody's.
        files = (self._folder / "tmp").glob("slackwater*")
        return left + [f"file {path.name}" for path in files]


def _processes() -> Iterator[tuple[int, bytes]]:
    """Every process that is not this one, with its command line and environment."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    said = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                    yield int(folder.name), said


def _settled(look: Any, limit_s: float = 10.0) -> list[str]:
    """What `look` still finds after a while."""
    deadline_s = time.monotonic() + limit_s
    while (found := look()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return [f"process {pid}: {said[:120]!r}" for pid, said in found]


def _shared_memory() -> set[str]:
    if not _SHARED_MEMORY.is_dir():
        return set()
    # Named semaphores are of multiprocessing, which nothing of a service uses, and so of somebody
    # else.
    names = (path.name for path in _SHARED_MEMORY.iterdir())
    return {name for name in names if name.startswith(("slackwater", "torch", "psm_"))}


def _mapped() -> set[str]:
    """The shared memory that a process of this machine has in use."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = (line.rsplit("/", 1) for line in maps.read_text().splitlines())
            found |= {line[1] for line in lines if line[0].endswith(str(_SHARED_MEMORY))}
    return found
