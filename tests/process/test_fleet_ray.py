"""The fleet's tests over a real Ray cluster of three nodes on this machine; `make test-ray` runs
them.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.ports import free_port

from .service_process import ServiceProcess, wait_for
from .test_fleet import nodes
from .test_rollout_service import completions

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "SLACKWATER_RAY" not in os.environ,
        reason="starts a Ray cluster, which not every machine has the memory for: `make test-ray`",
    ),
]

FLEET = """
launcher = "ray"
[ray]
address = "{address}"
directory = "{directory}"
[[pools]]
name = "mixed"
engines = 1
trainers = 1
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = shared_memory()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()
    wait_for("shared memory to be gone", lambda: shared_memory() <= before)


def shared_memory() -> set[str]:
    """What of Ray's has a name; the relays' has none, and goes with their processes."""
    kinds = ("ray", "plasma")
    return {file.name for file in Path("/dev/shm").iterdir() if file.name.startswith(kinds)}


def ports_of(processes: list[int]) -> set[int]:
    """Where they listen."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for one in psutil.Process(process).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(one.laddr.port)
    return found


def taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def fleet(
    cluster: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("ray")
    file = folder / "fleet.toml"
    file.write_text(FLEET.format(address=cluster.address, directory=folder / "nodes"))
    service = ServiceProcess(folder / "state", tiny_model, free_port(), "--fleet", str(file))
    service.start()
    wait_for("three nodes", lambda: len(nodes(service)) == 3, 400)
    yield service
    listening = ports_of(agents_of(folder))
    assert listening
    assert service.stop() == 0
    wait_for("every process to be gone", lambda: agents_of(folder) == [])
    assert not [port for port in listening if taken(port)]


def agents_of(folder: Path) -> list[int]:
    """Processes of the fleet's nodes that still live."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in process.info["cmdline"] or ()):
                found.append(process.info["pid"])
    return found


def test_turns_go_on_when_a_ray_node_dies_and_a_new_one_is_followed(
    cluster: Any, fleet: ServiceProcess, new_service: Callable[..., ServiceProcess]
) -> None:
    alone = new_service()
    alone.start()
    alone.wait_for_workers()
    wanted = completions(alone, 200)
    assert alone.stop() == 0
    assert completions(fleet, 200) == wanted
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(completions, fleet, 200)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        assert again.result(timeout=300) == wanted
    wait_for("the lost node to be seen", lambda: len(nodes(fleet)) == 2, 200)
    cluster.add_node(num_cpus=1)
    wait_for("the new node", lambda: len(nodes(fleet)) == 3, 400)
    assert completions(fleet, 200) == wanted
