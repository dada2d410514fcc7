"""Versions over a real Mooncake Store: a master, a process that publishes and one that pulls. Needs the package mooncake-transfer-engine."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slackwater.model.errors import NotFoundError, RefusedError
from slackwater.weights.mooncake import MooncakeWeightStore

from .conftest import free_port
from .service_process import wait_for

try:
    import mooncake.store as store_module
except ImportError as missing:
    pytest.skip(f"no Mooncake Store here: {missing}", allow_module_level=True)

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PULLER = """
import json, sys
from slackwater.weights.mooncake import MooncakeWeightStore
store = MooncakeWeightStore(sys.argv[1], 1 << 16)
sums = {name: t.double().sum().item() for name, t in store.pull(sys.argv[2]).items()}
print(json.dumps([store.versions(), dict(store.manifest(sys.argv[2]).meta), sums]), flush=True)
store.close()
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program = Path(str(store_module.__file__)).parent / "mooncake_master"
    port = free_port()
    log = tmp_path_factory.mktemp("mooncake") / "master.log"
    command = [str(program), "--rpc_address=127.0.0.1", f"--rpc_port={port}"]
    with log.open("wb") as out:
        command.append(f"--metrics_port={free_port()}")
        master = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        wait_for("the master", lambda: _answers(port), 30)
        yield f"mooncake://127.0.0.1:{port}/job-a"
    finally:
        master.kill()
        master.wait(10)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def weights(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a": torch.randn(300, 257), "b": torch.randn(1000).bfloat16(), "c": torch.tensor([1])}


def test_what_one_process_publishes_another_pulls_to_the_bit(url: str) -> None:
    store = MooncakeWeightStore(f"{url}?lend_mb=64", 1 << 16)
    try:
        first = weights(1)
        store.publish("v/1", first, {"step": 1})
        store.publish("v/1", first, {"step": 1})
        with pytest.raises(RefusedError, match="other weights"):
            store.publish("v/1", weights(2), {"step": 1})
        assert all(torch.equal(found, first[name]) for name, found in store.pull("v/1").items())
        pulled = subprocess.run(
            [sys.executable, "-c", PULLER, url, "v/1"],
            capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ),
        )  # fmt: skip
        versions, meta, sums = json.loads(pulled.stdout.splitlines()[-1])
        assert (versions, meta) == (["v/1"], {"step": 1})
        assert sums == {name: tensor.double().sum().item() for name, tensor in first.items()}
        store.publish("v/2", weights(2), {})
        assert store.retain(["v/2"]) == ("v/1",)
        assert store.versions() == ("v/2",)
        with pytest.raises(NotFoundError, match="v/2"):
            store.pull("v/1")
    finally:
        store.close()
