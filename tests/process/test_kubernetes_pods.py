"""The pods of a pool as the manifests describe them, each in a network namespace of its own: what
Kubernetes' kubelet does to a pod is done to its process.
"""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.namespaces import Host, can_make_hosts, hosts
from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_rollout_service import completions

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_make_hosts(), reason="this user may make no network namespaces"),
]

FLEET = """
launcher = "join"
listen = "{address}:0"
[[pools]]
name = "rollout"
engines = 1
[[kubernetes]]
pool = "rollout"
image = "slackwater:1"
nodes = 2
notice_s = 600
"""


class Pod:
    """One index of the Job: its container's arguments, its token, its empty directory."""

    def __init__(self, manifests: list[dict[str, Any]], index: int, host: Host, folder: Path):
        secret, job = manifests
        self._spec = job["spec"]["template"]["spec"]
        (container,) = self._spec["containers"]
        token, node = (mount["mountPath"] for mount in container["volumeMounts"])
        name = container["volumeMounts"][0]["subPathExpr"].replace(
            "$(JOB_COMPLETION_INDEX)", str(index)
        )
        folder.mkdir()
        (folder / "token").write_text(secret["stringData"][name])
        places = {token: str(folder / "token"), node: str(folder / "node")}
        self._arguments = [places.get(word, word) for word in container["args"]]
        self._host, self._folder, self.node = host, folder, name
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        command = self._host.command(sys.executable, "-m", "slackwater", *self._arguments)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def terminate(self) -> None:
        """The first half of an eviction."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        """How it ended, within the grace period of the manifest."""
        assert self._process is not None
        return self._process.wait(min(self._spec["terminationGracePeriodSeconds"], 240))

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def test_an_evicted_pod_moves_its_turns_in_its_grace_and_its_successor_joins(
    tiny_model: Path, tmp_path: Path
) -> None:
    with hosts(2) as site:
        file = tmp_path / "fleet.toml"
        file.write_text(FLEET.format(address=site.address))
        options = ("--fleet", str(file))
        service = ServiceProcess(tmp_path / "state", tiny_model, free_port(), *options)
        service.start()
        pods: list[Pod] = []
        try:
            command = [sys.executable, "-m", "slackwater", "launch", "kubernetes"]
            command += ["--fleet", str(file), "--state", str(service.state)]
            printed = subprocess.run(command, capture_output=True, text=True, check=True)
            items = json.loads(printed.stdout)["items"]
            pods += [
                Pod(items, index, host, tmp_path / f"pod-{index}")
                for index, host in enumerate(site.hosts)
            ]
            evicted_and_replaced(service, pods)
        finally:
            for pod in pods:
                pod.kill()
            service.stop()


def evicted_and_replaced(service: ServiceProcess, pods: list[Pod]) -> None:
    def running() -> dict[str, int]:
        rows = service.get("/slackwater/instances").json()["instances"]
        return {row["instance"]: row["running"] for row in rows if "running" in row}

    for pod in pods:
        pod.run()
    wait_for("both engines", lambda: len(running()) == 2)
    wanted = completions(service, 300)
    leaving = pods[1]
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(completions, service, 300)
        wait_for(
            "work on the pod",
            lambda: any(n for name, n in running().items() if leaving.node in name) or again.done(),
        )
        leaving.terminate()
        assert again.result(timeout=240) == wanted
    assert leaving.status() == os.EX_TEMPFAIL  # a failed pod, which the Job replaces
    leaving.run()
    wait_for("its successor", lambda: len(running()) == 2)
    assert completions(service, 300) == wanted
