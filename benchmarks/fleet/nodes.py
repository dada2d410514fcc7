"""bench fleet: three nodes without a shared disk; one is killed, one frozen for a minute, one cut
off and healed.

Every node is a network namespace (where they can be made) with an agent that joined over TLS, two
engines and a trainer. The same turns and the same training run go through one machine first: what a
client sees must be the same to the bit.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fleet.workload import Answers, generate, train
from benchmarks.options import BenchOptions
from harness.namespaces import Host, can_make_hosts, hosts, pids_of
from slackwater.cli.node import node_token
from slackwater.cli.own_service import own_service
from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.zoo.tiny import make_model

_NODES = 3
_POOL = '[[pools]]\nname = "mixed"\nengines = 2\ntrainers = 1\n'
_HERE_S = 400.0


class FleetNodeProcess:
    """One node: its agent and, through it, its workers."""

    def __init__(self, name: str, host: Host, directory: Path, token: str) -> None:
        self.name = name
        self.host = host
        self._directory = directory
        self._token = token
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "slackwater", "agent"]
        command += ["--directory", str(self._directory)]
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.host.command(*command),
                stdout=log,
                stderr=log,
                env=os.environ | {"SLACKWATER_JOIN": self._token},
            )

    def signal_all(self, number: signal.Signals) -> None:
        """To the agent and every worker, as to a machine."""
        for pid in pids_of(self.host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGKILL and self._process is not None:
            self._process.wait(30)

    def end(self) -> None:
        """As Ctrl-C would."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)


def run(options: BenchOptions) -> dict[str, object]:
    """Figures of one undisturbed run on one machine and one disturbed run on the fleet."""
    if not can_make_hosts():
        raise RefusedError("bench fleet needs network namespaces: Linux, root, and iproute2")
    turns, tokens, steps = (32, 200, 6) if options.quick else (256, 300, 12)
    frozen_s, cut_s = (25.0, 25.0) if options.quick else (60.0, 30.0)
    with tempfile.TemporaryDirectory(prefix="slackwater-fleet-") as made, hosts(_NODES) as net:
        folder = Path(made)
        make_model("tiny", folder / "model", options.seed)
        options.progress("one machine", 0.05)
        alone = Answers()
        began_s = time.monotonic()
        with own_service(folder / "alone", "tiny", folder / "model") as (url, key):
            _work(url, key, alone, turns, tokens, steps, lambda step: None)
        alone_s = time.monotonic() - began_s
        options.progress("three nodes", 0.3)
        (folder / "fleet.toml").write_text(
            f'launcher = "join"\nlisten = "{net.address}:0"\n{_POOL}'
        )
        fleet = Answers()
        with own_service(
            folder / "state", "tiny", folder / "model", "--fleet", str(folder / "fleet.toml")
        ) as (url, key):
            names = [f"n{number}" for number in range(len(net.hosts))]
            nodes = [
                FleetNodeProcess(
                    name, host, folder / name, node_token(folder / "state", name, "mixed")
                )
                for name, host in zip(names, net.hosts, strict=True)
            ]
            for node in nodes:
                node.start()
            _until(lambda: _here(url, key) == _NODES, "all nodes to join")
            disturbance = Disturbance(nodes, url, key, frozen_s, cut_s, fleet)
            began_s = time.monotonic()
            _work(url, key, fleet, turns, tokens, steps, disturbance.at_step)
            disturbance.finish()
            fleet_s = time.monotonic() - began_s
            back = _here(url, key)
            for node in nodes:
                node.end()
        left = sum(len(pids_of(host)) for host in net.hosts)
    return {
        "turns": turns,
        "steps": steps,
        "different": alone.different(fleet),
        "recovery_s": round(disturbance.recovery_s, 2),
        "step_s": round(disturbance.step_s, 2),
        "nodes_back": back,
        "processes_left": left,
        "one_machine_s": round(alone_s, 1),
        "disturbed_fleet_s": round(fleet_s, 1),
        "frozen_s": frozen_s,
        "cut_off_s": cut_s,
    }


class Disturbance:
    """Kills the node that has the model in training, cuts another off and heals it, freezes the
    third; one after another, beside the work. `recovery_s` is from the kill to the end of the first
    training step that began after the kill; a step takes `step_s` undisturbed.
    """

    def __init__(
        self,
        nodes: list[FleetNodeProcess],
        url: str,
        key: str,
        frozen_s: float,
        cut_s: float,
        answers: Answers,
    ) -> None:
        self._nodes, self._url, self._key = nodes, url, key
        self._frozen_s, self._cut_s = frozen_s, cut_s
        self._answers = answers
        self._thread = threading.Thread(target=self._disturb, daemon=True)
        self._error: BaseException | None = None
        self._began_s = 0.0
        self.recovery_s = self.step_s = 0.0

    def at_step(self, step: int) -> None:
        """Begins with the third step of the training run; the second is what a step takes
        undisturbed.
        """
        now_s = time.monotonic()
        if step == 1:
            self._began_s = now_s
        elif step == 2:
            self.step_s = now_s - self._began_s
            self._thread.start()

    def finish(self) -> None:
        """Wait until every node is as it was; raise what went wrong."""
        self._thread.join(_HERE_S + self._frozen_s + self._cut_s)
        if self._error is not None:
            raise self._error
        _until(lambda: _here(self._url, self._key) == len(self._nodes), "all nodes to come back")

    def _disturb(self) -> None:
        try:
            killed = self._training_node()
            cut, frozen = (node for node in self._nodes if node is not killed)
            self.recovery_s = self._until_a_step_ends(lambda: killed.signal_all(signal.SIGKILL))
            _until(lambda: _here(self._url, self._key) < len(self._nodes), "the node's loss")
            killed.start()
            _until(lambda: _here(self._url, self._key) == len(self._nodes), "the killed node")
            cut.host.cut()
            time.sleep(self._cut_s)
            cut.host.heal()
            _until(lambda: _here(self._url, self._key) == len(self._nodes), "the healed node")
            frozen.signal_all(signal.SIGSTOP)
            time.sleep(self._frozen_s)
            frozen.signal_all(signal.SIGCONT)
        except BaseException as error:  # noqa: BLE001  (told by finish)
            self._error = error

    def _training_node(self) -> FleetNodeProcess:
        """The node whose trainer has the model."""
        (trainer,) = _ask(self._url, self._key, "status")["trained_by"].values()
        rows = _ask(self._url, self._key, "nodes")["nodes"]
        (name,) = (row["node"] for row in rows if trainer in row["workers"])
        return next(node for node in self._nodes if node.name == name)

    def _until_a_step_ends(self, disturb: Callable[[], None]) -> float:
        """Seconds from the disturbance to the end of a training step that began after it."""
        before = len(self._answers.losses)
        began_s = time.monotonic()
        disturb()
        _until(lambda: len(self._answers.losses) > before + 1, "training to go on")
        return time.monotonic() - began_s


def _work(
    url: str,
    key: str,
    answers: Answers,
    turns: int,
    tokens: int,
    steps: int,
    at_step: Callable[[int], None],
) -> None:
    """The turns beside the training run."""
    with _beside(lambda: generate(url, key, answers, turns, tokens, lambda done: None)):
        train(url, key, answers, steps, at_step)


@contextlib.contextmanager
def _beside(work: Callable[[], None]) -> Iterator[None]:
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (told below)
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


def _here(url: str, key: str) -> int:
    """Nodes of which at least one engine and the trainer run."""
    rows: list[dict[str, Any]] = _ask(url, key, "nodes")["nodes"]
    status = _ask(url, key, "status")
    joined = {*status["workers"]["engine"], *status["workers"]["trainer"]}
    return sum("host" in row and len(joined & set(row["workers"])) >= 3 for row in rows)


def _ask(url: str, key: str, what: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/slackwater/{what}", headers={"x-api-key": key}, timeout=30)
    found: dict[str, Any] = answer.json()
    return found


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + _HERE_S
    while not ready():
        if time.monotonic() > deadline_s:
            raise UnavailableError(f"waited {_HERE_S:.0f} s for {what}")
        time.sleep(0.1)
