"""A service that rents nodes by commands, while a job can use them, and leaves none behind."""

import sys
from pathlib import Path

import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_serve_faults import train

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

FLEET = """
launcher = "local"
[[pools]]
name = "mixed"
engines = 0
local_engines = 1
trainers = 1
[[pools]]
name = "spot"
engines = 1
price_per_h = 2.0
[[nodes]]
name = "a"
pool = "mixed"
[[providers]]
pool = "spot"
nodes = 2
rent = "sh {folder}/rent.sh {{node}} {{token_file}}"
release = "sh {folder}/release.sh {{node}} {{id}}"
budget = 100.0
idle_s = 8.0
"""
RENT = """
setsid {python} -m slackwater agent --join-file "$2" --directory {folder}/"$1" \
    >> {folder}/agent.log 2>&1 &
echo "$1 $!" >> {folder}/rented
echo "machine of $1"
echo $!
"""
RELEASE = """
kill "$2" 2> {folder}/ignored
echo "$1 $2" >> {folder}/released
"""


def machines(file: Path) -> list[str]:
    """The ids of machines that a script wrote down."""
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted(line.split()[1] for line in lines)


def gauges(service: ServiceProcess) -> dict[str, int]:
    return service.status()["gauges"]


def train_until_rented(service: ServiceProcess) -> None:
    """Take steps, each of which says how many engines it could use, until a node has joined."""

    def joined() -> bool:
        train(service, lambda step: None)
        return gauges(service)["nodes"] >= 2

    wait_for("a rented node", joined)


def is_over(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def test_nodes_are_rented_while_a_job_can_use_them_and_none_is_left(
    tiny_model: Path, tmp_path: Path
) -> None:
    scripts = {"rent.sh": RENT, "release.sh": RELEASE}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path, python=sys.executable))
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET.format(folder=tmp_path))
    options = ("--fleet", str(file))
    service = ServiceProcess(tmp_path / "state", tiny_model, free_port(), *options)
    service.start()
    try:
        service.wait_for_workers()
        assert gauges(service)["rented_nodes"] == 0
        train_until_rented(service)
        assert gauges(service)["rental_cost"] > 0
        wait_for("idle nodes to be returned", lambda: gauges(service)["rented_nodes"] == 0)
        began = machines(tmp_path / "rented")
        wait_for("their machines to end", lambda: machines(tmp_path / "released") == began)
        wait_for("their agents to end", lambda: all(map(is_over, began)))
        cost = gauges(service)["rental_cost"]
        train_until_rented(service)
        service.kill()
        service.start()
        wait_for("what was rented", lambda: gauges(service)["rented_nodes"] >= 1)
        assert gauges(service)["rental_cost"] >= cost
    finally:
        service.stop()
    rented = machines(tmp_path / "rented")
    assert len(rented) > len(began) >= 1
    assert machines(tmp_path / "released") == rented
    wait_for("all agents to end", lambda: all(map(is_over, rented)))
