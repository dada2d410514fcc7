"""The weight port over a folder."""

import gc
import json
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from slackwater.model.errors import ConfigError, NotFoundError, RefusedError
from slackwater.tensors import checked_file
from slackwater.tensors.checked_file import (
    combine_crc32,
    content_digest,
    read_tensors,
    write_tensors,
)
from slackwater.weights import directory
from slackwater.weights.directory import DirectoryWeightStore

TENSORS = {
    "model.embed.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "model.norm.weight": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


def store(folder: Path) -> DirectoryWeightStore:
    return DirectoryWeightStore(folder / "versions")


def test_a_pulled_version_is_bit_for_bit_what_was_published(tmp_path: Path) -> None:
    weights = store(tmp_path)
    weights.publish("run:7", TENSORS, {"rank": 8})
    pulled = weights.pull("run:7")
    assert pulled.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert pulled[name].dtype == tensor.dtype
        assert torch.equal(pulled[name], tensor)
    assert weights.manifest("run:7").meta == {"rank": 8}
    assert weights.manifest("run:7").shapes["model.embed.weight"] == (3, 4)


@given(version=st.text(min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_any_version_name_comes_back_and_stays_inside_the_folder(
    tmp_path_factory: pytest.TempPathFactory, version: str
) -> None:
    if any(0xD800 <= ord(c) < 0xE000 for c in version):
        return
    root = tmp_path_factory.mktemp("store")
    weights = DirectoryWeightStore(root)
    weights.publish(version, {"w": torch.zeros(1)}, {})
    assert weights.versions() == (version,)
    assert weights.path(version).parent == root


def test_an_unknown_version_is_an_error_that_names_what_is_there(tmp_path: Path) -> None:
    weights = store(tmp_path)
    weights.publish("a", TENSORS, {})
    with pytest.raises(NotFoundError, match=r"'b' is not in .* holds a"):
        weights.pull("b")


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -1])
def test_a_cut_version_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    weights = store(tmp_path)
    weights.publish("a", TENSORS, {})
    whole = weights.path("a").read_bytes()
    weights.path("a").write_bytes(whole[:keep_bytes])
    for look in (weights.pull, weights.manifest):
        with pytest.raises(ConfigError, match="cannot be used"):
            look("a")


def test_one_flipped_bit_of_a_tensor_is_refused(tmp_path: Path) -> None:
    weights = store(tmp_path)
    weights.publish("a", TENSORS, {})
    altered = bytearray(weights.path("a").read_bytes())
    altered[-1] ^= 1
    weights.path("a").write_bytes(altered)
    with pytest.raises(ConfigError, match="not as written"):
        weights.pull("a")


SHAPES = st.one_of(
    st.lists(st.integers(-2, 1 << 70), max_size=3),
    st.sampled_from(["3", {"a": 1}, None, [0.5], [True], [[3]], [3, 4]]),
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "U8", "F8_E4M3", "", 7, None]),
        "shape": SHAPES,
        "data_offsets": st.lists(st.integers(-8, 1 << 70) | st.just(float("inf")), max_size=3),
    },
)


@given(entry=ENTRIES, padding=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_a_header_that_lies_is_refused_with_one_error(
    tmp_path_factory: pytest.TempPathFactory, entry: dict[str, Any], padding: int
) -> None:
    path = tmp_path_factory.mktemp("lie") / "v.safetensors"
    write_tensors(path, TENSORS, {})
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    header = json.loads(before[8 : 8 + length])
    header["model.embed.weight"] |= entry
    told = json.dumps(header).encode() + b" " * padding
    path.write_bytes(len(told).to_bytes(8, "little") + told + before[8 + length :])
    try:
        tensors, _ = read_tensors(path)
    except ConfigError:
        return
    assert tensors.keys() == TENSORS.keys()
    assert all(
        content_digest({"": tensors[n]}) == content_digest({"": TENSORS[n]}) for n in TENSORS
    )


def test_reading_versions_again_and_again_keeps_nothing(tmp_path: Path) -> None:
    weights = store(tmp_path)
    weights.publish("a", {f"layer.{n}": torch.zeros(2, 3) for n in range(20)}, {})
    pulls, growth = 50, []
    for _ in range(3):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(pulls):
            weights.pull("a")
        gc.collect()
        growth.append(sys.getallocatedblocks() - before)
    assert min(growth) < pulls, growth


def test_publishing_the_same_again_is_nothing_and_other_weights_are_refused(tmp_path: Path) -> None:
    weights = store(tmp_path)
    weights.publish("a", TENSORS, {})
    weights.publish("a", TENSORS, {})
    with pytest.raises(RefusedError, match="other weights"):
        weights.publish("a", {**TENSORS, "model.norm.weight": torch.zeros(2)}, {})
    assert torch.equal(weights.pull("a")["model.norm.weight"], TENSORS["model.norm.weight"])


def test_a_publish_that_fails_leaves_nothing_visible_and_nothing_behind(tmp_path: Path) -> None:
    weights = store(tmp_path)
    with pytest.raises(TypeError):
        weights.publish("a", TENSORS, {"not json": object()})
    assert weights.versions() == ()
    assert list((tmp_path / "versions").iterdir()) == []


def test_a_version_that_is_dropped_leaves_the_others(tmp_path: Path) -> None:
    weights = store(tmp_path)
    for version in ("a", "b", "c"):
        weights.publish(version, TENSORS, {})
    for version in ("a", "c", "z"):
        weights.drop(version)
    assert weights.versions() == ("b",)
    weights.pull("b")


def test_files_have_the_same_bytes_every_time_and_open_in_safetensors(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(5, 3),
        "a": torch.randn(7).bfloat16(),
        "empty": torch.empty(0, 4),
        "number": torch.tensor(3),
        "turned": torch.randn(4, 6).T,
    }
    for name, durable in (("one", True), ("two", False)):
        labels = {"z": "1", "format": "pt"}
        write_tensors(tmp_path / name, tensors, {"step": 1}, labels, durable=durable)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with safe_open(tmp_path / "one", framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        for name, tensor in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)
    found, header = read_tensors(tmp_path / "one")
    assert header.meta == {"step": 1} and found.keys() == tensors.keys()


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_sums_of_two_halves_join_to_the_sum_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine_crc32(crc32(first), crc32(second), len(second)) == crc32(first + second)


@pytest.mark.parametrize("threads", [1, 3])
def test_long_tensors_go_in_pieces_and_one_changed_byte_is_seen(
    tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked_file, "_PIECE", 64)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensors = {"long": torch.randn(1001), "short": torch.ones(3), "none": torch.empty(0)}
    write_tensors(tmp_path / "file", tensors, {})
    found, header = read_tensors(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert header.crc32 == {name: checked_file.checksum(t) for name, t in tensors.items()}
    damaged = bytearray((tmp_path / "file").read_bytes())
    damaged[-500] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    with pytest.raises(ConfigError, match="the bytes of long are not as written"):
        read_tensors(tmp_path / "file")


def test_of_two_publishers_at_once_the_first_wins_and_the_other_hears_both_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, others = store(tmp_path), {name: tensor + 1 for name, tensor in TENSORS.items()}
    write, first = checked_file.write_tensors, [True]

    def overtaken(*given: Any, **options: Any) -> None:
        """Another publisher is done between our look and our rename."""
        if first.pop():
            first.append(False)
            weights.publish("v", TENSORS, {})
        write(*given, **options)

    monkeypatch.setattr(directory, "write_tensors", overtaken)
    digests = [content_digest(tensors)[:16] for tensors in (TENSORS, others)]
    with pytest.raises(RefusedError, match=rf"{digests[0]}; these have {digests[1]}"):
        weights.publish("v", others, {})
    assert torch.equal(weights.pull("v")["model.norm.weight"], TENSORS["model.norm.weight"])
    assert [path.name for path in weights.path("v").parent.iterdir()] == ["v.safetensors"]
    weights.publish("v", TENSORS, {})  # the same again is nothing
