"""The batch script of a pool, the files around it, and what is refused."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.runtime.launch.slurm import SlurmPool, batch_script, submit, write_batch_files

POOL = SlurmPool(
    "rollout",
    nodes=3,
    gpus=8,
    partition="spot",
    time_limit="1-00:00:00",
    notice_s=40,
    options=("--account=rl",),
    setup=("module load cuda",),
    program="slackwater",
)


def test_a_script_asks_for_an_element_per_node_that_is_warned_and_requeued() -> None:
    script = batch_script(POOL, Path("/shared/fleet"))
    directives = {
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")
    }
    assert directives >= {
        "--array=0-2",
        "--requeue",
        "--signal=TERM@50",
        "--gpus-per-node=8",
        "--partition=spot",
        "--time=1-00:00:00",
        "--account=rl",
        "--output=/shared/fleet/rollout-%a.log",
    }
    assert "--signal" not in batch_script(SlurmPool("rollout", notice_s=0), Path("/shared"))


def test_an_element_runs_the_agent_of_its_own_node(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "module"):
        (programs / name).write_text('#!/bin/sh\necho "${0##*/} $*"\n')
        (programs / name).chmod(0o755)
    script = tmp_path / "rollout.sbatch"
    script.write_text(batch_script(POOL, tmp_path))
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "2"}
    said = subprocess.run(
        ["bash", str(script)], env=variables, capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines() == [
        "module load cuda",
        f"srun slackwater agent --join-file {tmp_path}/rollout-2.token"
        " --directory /tmp/slackwater/rollout-2 --notice-s 40",
    ]


def test_tokens_are_readable_by_their_owner_alone_and_in_no_script(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    scripts = write_batch_files([POOL], folder, lambda node, pool: f"secret of {node} {pool}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for number in range(3):
        token = folder / f"rollout-{number}.token"
        assert token.read_text() == f"secret of rollout-{number} rollout\n"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert "secret" not in scripts["rollout"].read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nodes": 0}, "slurm: p: nodes: 0 must be at least 1"),
        ({"partition": "a b"}, "slurm: p: partition: 'a b' must have no spaces"),
        ({"options": ("--wrap=x\n#SBATCH --uid=0",)}, "slurm: p: options: "),
        ({"options": ("rm",)}, "must be written as --name or --name=value"),
        ({"setup": ("a\nb",)}, "must be one line each"),
    ],
)
def test_what_would_change_the_script_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        SlurmPool("p", **wrong)  # type: ignore[arg-type]
    assert said in str(error.value)


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="squeue is not here: run this on a login node"):
        submit(POOL, tmp_path / "rollout.sbatch")


def test_a_pool_is_not_submitted_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\ncase "$*" in *--name=slackwater-rollout*) echo 41; esac\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="is in Slurm's queue as job 41; scancel"):
        submit(POOL, tmp_path / "rollout.sbatch")
