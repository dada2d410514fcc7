"""A Slurm cluster on this machine: munged, slurmctld and one slurmd per node, all in one folder.

Debian's packages are enough: `apt-get install slurm-wlm munge`. The daemons need root.
"""

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

from harness.ports import free_port

_STARTS_WITHIN_S = 120.0
_CONFIG = """
ClusterName=slackwater
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/control
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=30
ReturnToService=2
SchedulerParameters=requeue_delay=0,bf_interval=5
SlurmdParameters=config_overrides
MpiDefault=none
"""


def _node_of(process: psutil.Process) -> str | None:
    """The node that Slurm started a process on."""
    try:
        node: str | None = process.environ().get("SLURMD_NODENAME")
    except psutil.Error:
        return None
    return node


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.parents())
    except psutil.NoSuchProcess:
        return []


class SlurmCluster:
    """Nodes `n0`, `n1`, ... of `cores` each; `environment` lets Slurm's commands find them."""

    def __init__(self, folder: Path, nodes: int = 2, cores: int = 2) -> None:
        self.folder = folder
        self.nodes = tuple(f"n{number}" for number in range(nodes))
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._cores = cores

    def __enter__(self) -> "SlurmCluster":
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "control").mkdir()
        host = socket.gethostname().partition(".")[0]
        lines = [_CONFIG.format(host=host, port=free_port(), folder=self.folder)]
        for node in self.nodes:
            (self.folder / node).mkdir()
            where = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
            lines.append(f"NodeName={node} {where} CPUs={self._cores} State=UNKNOWN\n")
        lines.append(f"PartitionName=main Nodes={','.join(self.nodes)} Default=YES MaxTime=60\n")
        (self.folder / "slurm.conf").write_text("".join(lines))
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        try:
            self._start_all(key)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start_all(self, key: Path) -> None:
        munge = [f"--key-file={key}", f"--socket={self.folder}/munge.socket", "--force"]
        munge += [f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "pid", "seed")]
        self._start("munged", "munged", "--foreground", *munge)
        self._wait(lambda: (self.folder / "munge.socket").exists())
        self._start("slurmctld", "slurmctld", "-D")
        for node in self.nodes:
            self.start_node(node)
        self._wait(lambda: self.states() == dict.fromkeys(self.nodes, "idle"))

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start(node, "slurmd", "-D", "-N", node)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def run(self, *command: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            command,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=_STARTS_WITHIN_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """The nodes' states."""
        shown = subprocess.run(
            ["sinfo", "--noheader", "-N", "--format=%N %T"],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
        ).stdout
        rows = [line.split() for line in shown.splitlines()]
        return {row[0]: row[1] for row in rows}

    def jobs(self) -> dict[str, tuple[str, str]]:
        """State and node of each job by array element."""
        shown = self.run("squeue", "--noheader", "--array", "--format=%i %T %N")
        rows = [line.split() for line in shown.splitlines()]
        return {row[0]: (row[1], row[2] if len(row) > 2 else "") for row in rows}

    def kill_node(self, node: str) -> None:
        """SIGKILL of the node's daemon and of all that it runs, as if its power failed."""
        daemon = self._daemons.pop(node)
        tasks = [process for process in psutil.process_iter() if _node_of(process) == node]
        # The step daemons first: they would report how their tasks ended.
        parents = [parent for task in tasks for parent in _parents(task)]
        steps = [parent for parent in parents if "slurmstepd" in parent.name()]
        for process in [psutil.Process(daemon.pid), *steps, *tasks]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        daemon.wait()

    def _wait(self, ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + _STARTS_WITHIN_S
        while not ready():
            assert time.monotonic() < deadline_s, self.account()
            time.sleep(0.1)

    def account(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"{log}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for node in self.nodes:
            if node in self._daemons:
                self.kill_node(node)
        for process in self._daemons.values():
            process.kill()
            process.wait()
