"""Which models fit this machine's memory: the table of `slackwater model list`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slackwater.model.device import CUDA
from slackwater.model.ids import NodeId
from slackwater.zoo.sources import StoredModel

_GIB = 1 << 30
_KV_BYTES = 1 << 30  # the default of `slackwater up --kv-mb`
# Bytes per parameter. `serve`: the engine's copy. `adapter`: and a frozen copy of the trainer.
# `full`: and an fp32 master, a gradient and both moments of Adam.
_CPU_BYTES = {"serve": 4, "adapter": 8, "full": 20}
_GPU_BYTES = {"serve": 2, "adapter": 4, "full": 20}


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The memory of this machine's smallest GPU, or of the machine if it has none."""

    device: str
    size: int


def machine_memory() -> MachineMemory:
    """The smallest GPU if the driver shows any, otherwise the machine's own memory."""
    from slackwater.worker.node_devices import node_devices

    devices = [device for device in node_devices(NodeId("here")) if device.memory_mb]
    gpus = [device for device in devices if device.kind == CUDA]
    smallest = min(gpus or devices, key=lambda device: device.memory_mb)
    return MachineMemory(smallest.kind, smallest.memory_mb << 20)


def fit_table(models: Sequence[StoredModel], memory: MachineMemory) -> list[dict[str, Any]]:
    """Each model with the bytes that each use needs on one device, and whether they fit."""
    each = _GPU_BYTES if memory.device == CUDA else _CPU_BYTES
    rows = []
    for model in models:
        needs = {use: model.parameters * size + _KV_BYTES for use, size in each.items()}
        row = {
            "name": model.name,
            "directory": str(model.directory),
            "parameters": model.parameters,
            "problem": model.problem,
            "needs_bytes": {} if model.problem else needs,
            "fits": {use: not model.problem and size <= memory.size for use, size in needs.items()},
        }
        rows.append(row)
    return rows


def fit_lines(table: Sequence[dict[str, Any]], memory: MachineMemory) -> Iterator[str]:
    yield f"smallest device of this machine: {memory.device} with {memory.size / _GIB:.1f} GiB"
    if not table:
        yield "no models; see `slackwater model get --help` and `slackwater model make --help`"
        return
    width = max(len(row["name"]) for row in table)
    yield f"{'name':{width}}  {'parameters':>10}  {'serve':>10}  {'adapter':>10}  {'full':>10}"
    for row in table:
        if row["problem"]:
            yield f"{row['name']:{width}}  cannot be used: {row['problem']}"
            continue
        cells = [
            f"{size / _GIB:6.1f} {'yes' if row['fits'][use] else 'no ':>3}"
            for use, size in row["needs_bytes"].items()
        ]
        count = f"{row['parameters'] / 1e6:.1f} M"
        yield f"{row['name']:{width}}  {count:>10}  {'  '.join(cells)}  {row['directory']}"
    yield "columns: GiB to serve, to train an adapter, to train all weights; without activations"
