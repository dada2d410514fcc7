"""What a vLLM server loads: the directory of a version is the version, to the bit."""

import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slackwater.model.payload import Payload
from slackwater.nets.loading import load_net, net_config, net_tensors
from slackwater.nets.lora import LoraAdapter, LoraSpec, lora_meta
from slackwater.weights.directory import DirectoryWeightStore
from slackwater.weights.relay.host_copy import host_version
from slackwater.weights.relay.node_relay import NodeRelay
from slackwater.weights.relay.publisher import RelayPublisher
from slackwater.worker.engine_server.mapped_files import MappedFiles
from slackwater.worker.engine_server.versions import VersionDirectories
from slackwater.worker.puller import WeightLane
from slackwater.zoo.tiny import make_model

SECRET = b"of this fleet"


def test_a_delta_changes_the_adapters_copy_and_the_server_gets_the_whole(tmp_path: Path) -> None:
    make_model("tiny", tmp_path / "model", 0)
    tensors = {name: t.clone() for name, t in net_tensors(load_net(tmp_path / "model")).items()}
    (tmp_path / "served").mkdir()
    with ExitStack() as stack:
        relay = NodeRelay(SECRET, "node", "127.0.0.1", 64 << 20, tell=lambda _: None)
        stack.callback(relay.close)
        lane = WeightLane(
            DirectoryWeightStore(tmp_path / "store"),
            relay.address,
            secret=SECRET,
            node="node",
        )
        stack.callback(lane.close)
        versions = VersionDirectories(lane, tmp_path / "model", "base", tmp_path / "served")
        stocker = RelayPublisher(relay.address, SECRET)
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


def own_tensors(model: Path) -> dict[str, Tensor]:
    make_model("tiny", model, 0)
    return {name: tensor.clone() for name, tensor in net_tensors(load_net(model)).items()}


def own_versions(
    folder: Path, *, in_memory: bool = False
) -> tuple[dict[str, Tensor], DirectoryWeightStore, VersionDirectories]:
    """A model's tensors, where versions are published, and the directories made of them."""
    tensors = own_tensors(folder / "model")
    (folder / "served").mkdir()
    store = DirectoryWeightStore(folder / "store")
    places = (folder / "model", "base", folder / "served")
    return tensors, store, VersionDirectories(WeightLane(store), *places, in_memory=in_memory)


def equal(file: Path, tensors: Mapping[str, Tensor]) -> bool:
    loaded = load_file(file)
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    wanted = {**tensors, "lm_head.weight": head}
    return loaded.keys() == wanted.keys() and all(
        torch.equal(loaded[name], wanted[name]) for name in wanted
    )


def test_a_dropped_versions_memory_takes_the_next_and_the_ones_beside_it_stay(
    tmp_path: Path,
) -> None:
    tensors, store, versions = own_versions(tmp_path, in_memory=True)
    published: dict[str, dict[str, Tensor]] = {}
    files: dict[str, str] = {}
    for number in range(5):
        version = f"v{number}"
        published[version] = {name: tensor + number for name, tensor in tensors.items()}
        store.publish(version, published[version], lora_meta(None))
        versions.pull(version)
        file = versions.directory(version) / "model.safetensors"
        files[version] = str(file.readlink())
        assert equal(file, published[version])
        if number:
            before = versions.directory(f"v{number - 1}") / "model.safetensors"
            assert equal(before, published[f"v{number - 1}"])
            versions.drop(f"v{number - 1}")
    assert len(set(files.values())) == 2, files
    seen = (
        "import sys; from safetensors import safe_open;"
        "print(len(safe_open(sys.argv[1], 'pt').keys()))"
    )
    path = str(versions.directory("v4") / "model.safetensors")
    other = subprocess.run([sys.executable, "-c", seen, path], capture_output=True, timeout=60)
    assert int(other.stdout) == len(tensors | {"lm_head.weight": None}), other.stderr


def test_a_server_that_keeps_its_mappings_reads_what_a_file_holds_now(tmp_path: Path) -> None:
    """Versions are dropped out of order: a file is filled again, and the number of a closed
    descriptor, so the path of its file, becomes that of another.
    """
    tensors, store, versions = own_versions(tmp_path, in_memory=True)
    server = MappedFiles()
    number, paths, files = 0, set(), set()
    for held in (1, 3, 1, 2, 3, 1):
        names = [f"v{number + each}" for each in range(held)]
        for version in names:
            number += 1
            published = {name: tensor + number for name, tensor in tensors.items()}
            store.publish(version, published, lora_meta(None))
            versions.pull(version)
            path = str((versions.directory(version) / "model.safetensors").readlink())
            paths.add(path)
            files.add(Path(path).stat().st_ino)
            mapped = server.tensors(path)
            whole = {"lm_head.weight": tensors["model.embed_tokens.weight"] + number, **published}
            assert mapped.keys() == whole.keys()
            assert all(torch.equal(mapped[name], whole[name]) for name in whole)
        for version in names:
            versions.drop(version)
    assert len(paths) < len(files) < number, "no path named another file, or no file was reused"


def test_a_file_with_a_name_is_read_anew(tmp_path: Path) -> None:
    path, server = tmp_path / "model.safetensors", MappedFiles()
    for number in range(3):
        save_file({"a": torch.full((3,), float(number))}, path)
        assert torch.equal(server.tensors(str(path))["a"], torch.full((3,), float(number)))


def test_a_file_on_the_disk_holds_the_same(tmp_path: Path) -> None:
    tensors, store, versions = own_versions(tmp_path)
    store.publish("v", tensors, lora_meta(None))
    versions.pull("v")
    file = versions.directory("v") / "model.safetensors"
    assert not file.is_symlink()
    assert equal(file, tensors)


def test_an_adapter_is_merged_into_the_base(tmp_path: Path) -> None:
    tensors, store, versions = own_versions(tmp_path)
    assert equal(versions.directory("base") / "model.safetensors", tensors)
    lora, config = LoraSpec(4), net_config(tmp_path / "model")
    factors = LoraAdapter.create(lora, config).tensors
    for factor in factors.values():
        factor.copy_(torch.randn(factor.shape, generator=torch.Generator().manual_seed(1)))
    store.publish("a", factors, lora_meta(lora))
    versions.pull("a")
    versions.merge("a")
    adapter = LoraAdapter(lora, config, factors)
    wanted = {"lm_head.weight": tensors["model.embed_tokens.weight"], **tensors}
    for layer in lora.shapes(config):
        pair = adapter.pair(layer)
        assert pair is not None
        first, second = pair
        wanted[f"{layer}.weight"] = wanted[f"{layer}.weight"] + lora.scale * (second @ first)
    assert versions.adapter("a") is None
    assert equal(versions.directory("a") / "model.safetensors", wanted)
