"""What a node agent finds on its machine."""

import os
from pathlib import Path

import pytest

from slackwater.model.device import CPU, CUDA, Device, core_slices, count_ranks, usable_devices
from slackwater.model.errors import ConfigError
from slackwater.model.ids import NodeId
from slackwater.worker.node_devices import link_domains, node_devices, parse_gpu_ids

NODE = NodeId("a")

TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tCPU Affinity
GPU0\t X \tNV4\tSYS\t0-3
GPU1\tNV4\t X \tSYS\t0-3
GPU2\tSYS\tSYS\t X \t4-7
"""
SMI = f"""#!/bin/sh
case "$1" in
--query-gpu*) printf '%s\\n' '0, GPU-aa, 81559' '1, GPU-bb, 81559' '2, GPU-cc, [N/A]' ;;
topo) printf '%s' '{TOPOLOGY}' ;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose driver knows three GPUs, two of them joined by NVLink."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def gpus(**options: object) -> list[Device]:
    return [one for one in node_devices(NODE, **options) if one.kind == CUDA]  # type: ignore[arg-type]


@pytest.mark.usefixtures("driver")
def test_gpus_are_reported_with_memory_and_link_domain() -> None:
    found = gpus()
    assert [one.device for one in found] == ["a/cuda:0", "a/cuda:1", "a/cuda:2"]
    assert [one.visible for one in found] == ["GPU-aa", "GPU-bb", "GPU-cc"]
    assert [one.memory_mb for one in found] == [81559, 81559, 0]
    assert [one.domain for one in found] == ["0", "0", "2"]


@pytest.mark.usefixtures("driver")
def test_only_visible_gpus_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-aa")
    assert [one.visible for one in gpus()] == ["GPU-cc", "GPU-aa"]
    assert [one.visible for one in gpus(gpu_ids=("1",))] == ["GPU-bb"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == []


def test_gpus_that_no_driver_knows_can_be_named() -> None:
    found = gpus(gpu_ids=("0", "5"), probe=False)
    assert [(one.index, one.visible) for one in found] == [(0, "0"), (1, "5")]
    assert len({one.hardware for one in found}) == 2


def test_nodes_of_one_machine_may_share_its_only_gpu() -> None:
    assert [one.hardware for one in gpus(gpu_ids=("0",), probe=False, share_gpu=True)] == [""]
    assert all(one.hardware for one in gpus(gpu_ids=("0", "1"), probe=False, share_gpu=True))


def test_a_cpu_machine_is_one_device_or_several_slices() -> None:
    (whole,) = node_devices(NODE, probe=False, gpu_ids=())
    assert (whole.device, whole.cores) == ("a/cpu:0", ())
    slices = node_devices(NODE, slices=4, probe=False, gpu_ids=())
    assert [one.device for one in slices] == [f"a/cpu:{number}" for number in range(4)]
    assert len({len(one.cores) for one in slices}) == 1
    with pytest.raises(ConfigError, match="--devices: 0 must be at least 1"):
        node_devices(NODE, slices=0, probe=False)


def test_slices_are_equal_and_share_cores_only_where_there_are_too_few() -> None:
    assert core_slices(range(9), 4) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert core_slices([3, 7], 4) == [(3,), (7,), (3,), (7,)]


def test_without_nvlink_a_domain_ends_at_the_socket() -> None:
    matrix = "GPU0 X PHB SYS SYS\nGPU1 PHB X SYS SYS\nGPU2 SYS SYS X NODE\nGPU3 SYS SYS NODE X\n"
    assert link_domains(matrix) == {0: "0", 1: "0", 2: "2", 3: "2"}


def test_a_service_uses_the_devices_that_its_setting_names() -> None:
    found = [Device(NODE, 0, CUDA), Device(NODE, 1, CUDA), Device(NODE, 0, CPU)]
    assert usable_devices(found, "cuda") == tuple(found[:2])
    assert usable_devices(found, "cuda:1") == (found[1],)
    assert usable_devices(found, "cpu") == (found[2],)


@pytest.mark.parametrize("text", ["", "0,,1", "0,0"])
def test_wrong_gpu_ids_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be different ids"):
        parse_gpu_ids(text)


def test_a_layout_says_how_many_devices_it_needs() -> None:
    assert [count_ranks(text) for text in ("", "tp=2", "tp=2,dp=4")] == [1, 2, 8]
    for wrong in ("tp", "tp=0", "tp=2,tp=2", "zp=2"):
        with pytest.raises(ConfigError, match="must be such as tp=2"):
            count_ranks(wrong)
