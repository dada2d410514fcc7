"""The devices of this machine, as its node agent reports them.

GPUs are found through `nvidia-smi`, or /proc/driver/nvidia where that is missing, within
CUDA_VISIBLE_DEVICES. A CPU machine offers its cores as one device, or as several equal slices.
Nothing here loads PyTorch or touches a GPU.
"""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slackwater.model.device import CUDA, Device, core_slices
from slackwater.model.errors import ConfigError
from slackwater.model.ids import NodeId

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_PROC = Path("/proc/driver/nvidia/gpus")
_NUMA = Path("/sys/devices/system/node")
_TIMEOUT_S = 30.0  # without persistence mode the driver initializes every GPU first


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver reports it."""

    index: int
    uuid: str
    memory_mb: int = 0
    domain: str = ""


def parse_gpu_ids(text: str) -> tuple[str, ...]:
    """`0,1,2`: indices or UUIDs, as in CUDA_VISIBLE_DEVICES."""
    ids = tuple(part.strip() for part in text.split(","))
    if not all(ids) or len(set(ids)) != len(ids):
        raise ConfigError.of("--gpu-ids", text, "must be different ids, such as 0,1,2")
    return ids


def node_devices(
    node: NodeId,
    *,
    slices: int = 1,
    gpu_ids: Sequence[str] | None = None,
    probe: bool = True,
    share_gpu: bool = False,
) -> tuple[Device, ...]:
    """GPUs, then `slices` of the cores.

    With `gpu_ids` the GPUs are those, known to the driver or not; otherwise the driver is asked,
    unless `probe` is false. With `share_gpu` other nodes may report the machine's only GPU too.
    """
    gpus = find_gpus() if probe else []
    visible = os.environ.get(VISIBLE_VARIABLE)
    if probe and gpu_ids is None and visible is not None:
        gpu_ids = [part.strip() for part in visible.split(",") if part.strip()]
    if gpu_ids is None:
        devices = [_gpu_device(node, gpu.index, gpu) for gpu in gpus]
    else:
        gpu_by_name: Mapping[str, Gpu] = {
            **{str(gpu.index): gpu for gpu in gpus},
            **{gpu.uuid: gpu for gpu in gpus},
        }
        devices = [
            _gpu_device(node, number, gpu_by_name.get(name), name)
            for number, name in enumerate(gpu_ids)
        ]
    if share_gpu and len(devices) == 1:
        devices = [replace(devices[0], hardware="")]
    return (*devices, *_cpu_devices(node, slices))


def _gpu_device(node: NodeId, index: int, gpu: Gpu | None, name: str = "") -> Device:
    """Named by its UUID where it is known: CUDA and the driver number GPUs differently."""
    if gpu is None:
        hardware = f"{socket.gethostname()}/gpu:{name}"
        return Device(node, index, CUDA, visible=name, hardware=hardware)
    return Device(node, index, CUDA, gpu.memory_mb, gpu.domain, visible=gpu.uuid, hardware=gpu.uuid)


def _cpu_devices(node: NodeId, slices: int) -> list[Device]:
    if slices < 1:
        raise ConfigError.of("--devices", slices, "must be at least 1")
    memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    if slices == 1:  # all cores of the node
        return [Device(node, 0, memory_mb=memory_mb)]
    cores = sorted(os.sched_getaffinity(0))
    nodes = numa_nodes().items()
    return [
        Device(
            node,
            index,
            memory_mb=memory_mb // slices,
            domain=next((name for name, held in nodes if slice_cores[0] in held), ""),
            cores=slice_cores,
        )
        for index, slice_cores in enumerate(core_slices(cores, slices))
    ]


def parse_cores(text: str) -> set[int]:
    """`0-3,8` as numbers."""
    result: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        result.update(range(int(first), int(last if dash else first) + 1))
    return result


def numa_nodes() -> dict[str, set[int]]:
    """The cores of each NUMA node that has any."""
    texts = {
        file.parent.name: file.read_text() for file in sorted(_NUMA.glob("node[0-9]*/cpulist"))
    }
    return {name: parse_cores(text) for name, text in texts.items() if text.strip()}


def find_gpus() -> list[Gpu]:
    """All GPUs of the machine, regardless of CUDA_VISIBLE_DEVICES."""
    query = "--query-gpu=index,uuid,memory.total"
    output = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
    gpus = _parse_gpus(output) if output else _proc_gpus()
    if len(gpus) < 2:
        return gpus
    domains = link_domains(_run("nvidia-smi", "topo", "-m"))
    return [replace(gpu, domain=domains.get(gpu.index, "")) for gpu in gpus]


def _parse_gpus(text: str) -> list[Gpu]:
    gpus = []
    for line in text.splitlines():
        index, uuid, memory = (part.strip() for part in line.split(","))
        gpus.append(Gpu(int(index), uuid, int(memory) if memory.isdecimal() else 0))
    return gpus


def _proc_gpus() -> list[Gpu]:
    """The GPUs of a machine or container without `nvidia-smi`."""
    gpus: list[Gpu] = []
    for path in sorted(_PROC.glob("*/information")):
        pairs = (line.partition(":")[::2] for line in path.read_text().splitlines())
        facts = {name.strip(): value.strip() for name, value in pairs}
        if uuid := facts.get("GPU UUID"):
            gpus.append(Gpu(len(gpus), uuid))
    return gpus


def link_domains(matrix: str) -> dict[int, str]:
    """Each GPU's domain from `nvidia-smi topo -m`: the GPUs that NVLink or one socket joins."""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    links = [row[1 : 1 + len(rows)] for row in rows]
    has_nvlink = any(link.startswith("NV") for row in links for link in row)
    domains: dict[int, str] = {}
    for first, row in enumerate(links):
        domain = domains.setdefault(first, str(first))
        for other, link in enumerate(row):
            is_near = link.startswith("NV") if has_nvlink else link not in ("SYS", "X")
            if is_near:
                domains.setdefault(other, domain)
    return domains


def _run(*command: str) -> str:
    """A program's output; empty if it is missing, fails or hangs."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout
