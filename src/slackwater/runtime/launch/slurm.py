"""Pools whose nodes Slurm starts: one batch script per pool, an array with an element per node.

An element is a job of its own: it starts when one node is free, and when its node fails or it is
preempted, Slurm requeues that element alone, which joins again under the same name. Join tokens are
in files that only their owner can read; a script names the file.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.folder import write_whole

_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[^\s'\"]+)?")
# Slurm looks at time limits once a minute, so the notice may come that much earlier, never later.
_SPARE_S = 10
_ANSWERS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class SlurmPool:
    """The nodes of one pool that Slurm starts.

    `options` are more options of sbatch, `setup` shell lines that run before the agent, `program`
    the command that runs slackwater on a node: by default this installation, on a shared disk.
    """

    pool: str
    nodes: int = 1
    gpus: int = 0
    cores: int = 1
    partition: str = ""
    time_limit: str = ""
    notice_s: int = 60
    site: str = ""
    directory: str = "/tmp/slackwater"
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    program: str = ""

    def __post_init__(self) -> None:
        for field, least in (("nodes", 1), ("gpus", 0), ("cores", 1), ("notice_s", 0)):
            if getattr(self, field) < least:
                raise self._wrong(field, getattr(self, field), f"must be at least {least}")
        for field in ("partition", "time_limit", "site"):
            if not re.fullmatch(r"[\w.,:+-]*", getattr(self, field)):
                raise self._wrong(field, getattr(self, field), "must have no spaces or quotes")
        for option in self.options:
            if not _OPTION.fullmatch(option):
                raise self._wrong("options", option, "must be written as --name or --name=value")
        for field, line in [("setup", line) for line in self.setup] + [("program", self.program)]:
            if "\n" in line:
                raise self._wrong(field, line, "must be one line each")

    def _wrong(self, field: str, value: object, fix: str) -> ConfigError:
        return ConfigError.of(f"slurm: {self.pool}: {field}", value, fix)

    @property
    def job_name(self) -> str:
        """The name of its Slurm job."""
        return f"slackwater-{self.pool}"

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names under which its nodes join."""
        return tuple(f"{self.pool}-{number}" for number in range(self.nodes))


def batch_script(pool: SlurmPool, folder: Path) -> str:
    """The script of a pool, which finds its tokens in `folder` and logs there."""
    number = "$SLURM_ARRAY_TASK_ID"
    directives = [
        f"--job-name={pool.job_name}",
        f"--array=0-{pool.nodes - 1}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={pool.cores}",
        "--requeue",
        "--open-mode=append",
        f"--output={folder}/{pool.pool}-%a.log",
        *([f"--gpus-per-node={pool.gpus}"] if pool.gpus else []),
        *([f"--partition={pool.partition}"] if pool.partition else []),
        *([f"--time={pool.time_limit}"] if pool.time_limit else []),
        *([f"--signal=TERM@{pool.notice_s + _SPARE_S}"] if pool.notice_s else []),
        *pool.options,
    ]
    program = pool.program or f"{shlex.quote(sys.executable)} -m slackwater"
    agent = [
        f"exec srun {program} agent",
        f'--join-file {shlex.quote(str(folder))}/{pool.pool}-"{number}".token',
        f'--directory {shlex.quote(pool.directory)}/{pool.pool}-"{number}"',
        f"--notice-s {pool.notice_s}",
        *([f"--site {shlex.quote(pool.site)}"] if pool.site else []),
    ]
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives), "set -euo pipefail"]
    return "\n".join([*lines, *pool.setup, " \\\n    ".join(agent)]) + "\n"


def write_batch_files(
    pools: Sequence[SlurmPool], folder: Path, token_of: Callable[[str, str], str]
) -> dict[str, Path]:
    """Write the pools' scripts and their nodes' tokens (`token_of(node, pool)`); the scripts."""
    folder = folder.expanduser().resolve()
    if re.search(r"[\s'\"%\\]", str(folder)):
        raise ConfigError.of("--folder", str(folder), "must have no spaces, quotes or % in it")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    scripts = {}
    for pool in pools:
        for node in pool.node_names:
            write_whole(folder / f"{node}.token", token_of(node, pool.pool) + "\n")
        scripts[pool.pool] = folder / f"{pool.pool}.sbatch"
        write_whole(scripts[pool.pool], batch_script(pool, folder))
    return scripts


def submit(pool: SlurmPool, script: Path) -> str:
    """Submit a pool's script; the number of its Slurm job. ConfigError if it is there already."""
    queued = _run_program("squeue", "--me", "--noheader", "--format=%F", f"--name={pool.job_name}")
    if queued:
        fix = f"is in Slurm's queue as job {queued.split()[0]}; scancel --name={pool.job_name}"
        raise ConfigError.of("pool", pool.pool, f"{fix} ends it")
    return _run_program("sbatch", "--parsable", str(script)).partition(";")[0]


def _run_program(program: str, *arguments: str) -> str:
    if shutil.which(program) is None:
        raise UnavailableError(f"{program} is not here: run this on a login node of the cluster")
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_ANSWERS_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{program} did not answer in {_ANSWERS_WITHIN_S:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UnavailableError(f"{program}: {lines[-1]}")
    return done.stdout.strip()
