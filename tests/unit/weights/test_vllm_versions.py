"""What a vLLM server loads after its adapter took a delta: the directory is the version, to the
bit.
"""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file

from slackwater.model.payload import Payload
from slackwater.nets.loading import load_net, net_tensors
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.node_relay import NodeRelay
from slackwater.weights.relay.publisher import RelayStocker
from slackwater.worker.engine_server.versions import VersionDirectories
from slackwater.worker.weight_lane import WeightLane, lora_meta
from slackwater.zoo.tiny import make_model

SECRET = b"of this fleet"


def test_a_delta_changes_the_adapters_copy_and_the_server_gets_the_whole(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "model", 0)
    tensors = {name: t.clone() for name, t in net_tensors(load_net(tmp_path / "model")).items()}
    (tmp_path / "served").mkdir()
    with ExitStack() as stack:
        relay = NodeRelay(SECRET, "node", "127.0.0.1", 64 << 20)
        stack.callback(relay.close)
        lane = WeightLane(
            DirectoryWeightStore(tmp_path / "store"),
            relay.address,
            secret=SECRET,
            worker="vllm",
            node="node",
        )
        stack.callback(lane.close)
        versions = VersionDirectories(lane, tmp_path / "model", "base", tmp_path / "served")
        stocker = RelayStocker(relay.address, SECRET)
        stocker.stock("model", host_version("v1", tensors, lora_meta(None)))
        assert versions.pull("v1", [Payload("v1")], keep=True)
        for tensor in tensors.values():
            tensor.view(-1)[:3] += 1
        stocker.stock("model", host_version("v2", tensors, lora_meta(None)))
        assert versions.pull("v2", [Payload("v2", "v1")], keep=True)
        loaded = load_file(versions.directory("v2") / "model.safetensors")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        assert lane.pulled_over_relay == 2
        assert not versions.pull("v2", [Payload("v2", "v1")], keep=True), "it is there already"
