"""A service whose nodes come from a real Slurm cluster: nodes die and jobs are requeued in the
middle of a run, and its result is the same. Needs root, slurm-wlm and munge: `make test-slurm`.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from harness.ports import free_port
from harness.slurm_cluster import SlurmCluster
from slackwater.cli import launch as launch_command

from .service_process import ServiceProcess, wait_for
from .test_fleet import nodes
from .test_rollout_service import completions
from .test_serve_faults import STEPS, train

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        "SLACKWATER_SLURM" not in os.environ,
        reason="starts Slurm's daemons: run `make test-slurm` as root",
    ),
]
_REQUEUED_S = 400.0

FLEET = """
launcher = "join"
listen = "127.0.0.1:0"

[[pools]]
name = "mixed"
engines = 1
trainers = 1

[[slurm]]
pool = "mixed"
nodes = 2
notice_s = 25
directory = "{folder}/scratch"
options = ["--spread-job", "--exclusive"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def service(
    cluster: SlurmCluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("service")
    fleet = folder / "fleet.toml"
    fleet.write_text(FLEET.format(folder=folder))
    service = ServiceProcess(folder / "state", tiny_model, free_port(), "--fleet", str(fleet))
    service.start()
    command = ["slurm", "--fleet", str(fleet), "--state", str(service.state)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        submitted = CliRunner().invoke(launch_command.app, command)
        assert submitted.exit_code == 0, submitted.output
        again = CliRunner().invoke(launch_command.app, command)
        assert "is in Slurm's queue" in str(again.exception)
    try:
        wait_for("both nodes", lambda: len(nodes(service)) == 2, _REQUEUED_S)
        yield service
        assert service.stop() == 0
        wait_for("the agents' jobs to end", lambda: not cluster.jobs(), 240)
    finally:
        service.stop()


def element_of(cluster: SlurmCluster, node: str) -> str:
    """The array element that brings a node of the fleet."""
    number = node.rpartition("-")[2]
    return next(job for job in cluster.jobs() if job.endswith(f"_{number}"))


def test_tokens_are_in_files_of_their_owner_and_on_no_command_line(
    service: ServiceProcess,
) -> None:
    files = sorted((service.state / "slurm").glob("*.token"))
    assert [file.name for file in files] == ["mixed-0.token", "mixed-1.token"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    tokens = [file.read_text().strip() for file in files]
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        assert not any(token in line for token in tokens)


def test_an_evicted_node_gives_its_turns_away_and_joins_again(
    service: ServiceProcess, cluster: SlurmCluster
) -> None:
    wait_for("both nodes", lambda: len(nodes(service)) == 2, _REQUEUED_S)
    wanted = completions(service, 300)
    pid = nodes(service)["mixed-0"]["agent_pid"]
    cluster.run("scontrol", "requeue", element_of(cluster, "mixed-0"))
    assert completions(service, 300) == wanted
    log = service.state / "logs" / "service.log"
    wait_for("the notice", lambda: "node leaves node=mixed-0" in log.read_text(), 240)

    def back() -> bool:
        here = nodes(service).get("mixed-0")
        return here is not None and here["agent_pid"] != pid

    wait_for("the node to join again", back, _REQUEUED_S)
    assert "node leaves node=mixed-0 in_s=25" in log.read_text()


def test_a_run_does_not_notice_that_a_node_dies_and_its_job_is_requeued(
    service: ServiceProcess, cluster: SlurmCluster
) -> None:
    undisturbed = train(service, lambda step: None)
    killed: list[int] = []

    def disturb(step: int) -> None:
        if step == 2:
            cluster.run("scontrol", "requeue", element_of(cluster, "mixed-1"))
        if step == STEPS - 3:
            wait_for("both nodes", lambda: len(nodes(service)) == 2, _REQUEUED_S)
            (victim,) = [
                where
                for job, (_, where) in cluster.jobs().items()
                if job == element_of(cluster, "mixed-0")
            ]
            killed.append(nodes(service)["mixed-0"]["agent_pid"])
            cluster.kill_node(victim)
            cluster.start_node(victim)

    disturbed = train(service, disturb)
    assert disturbed.losses == undisturbed.losses
    assert disturbed.tokens == undisturbed.tokens
    wait_for("the requeued node", lambda: len(nodes(service)) == 2, _REQUEUED_S)
    assert nodes(service)["mixed-0"]["agent_pid"] not in killed
