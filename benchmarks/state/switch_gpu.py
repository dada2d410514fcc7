"""Warm switches on a GPU: device <-> pinned host, beside a running operation. Prints one JSON
object.

    python -m benchmarks.state.switch_gpu [--switches 50] [--scale 1.0] [--device cuda:0]

Two 8B-shape LoRA deployments (a frozen bf16 base; adapter, fp32 masters and moments) and two
1.7B-shape full ones (bf16, fp32 master weights and moments) take turns on a device that holds half
of them. `to_device_over_copy` and `to_host_over_copy` are the manager's speed over that of one long
pinned copy in the same run. The overlap is measured against a matrix product that runs on the
default stream. With `--device cpu` and a small `--scale` the same runs anywhere.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slackwater.control.state.events import NextHinted
from slackwater.model.residency import PartRole, StateBudgets, StateKey, StoredPart, Tier
from slackwater.state.device import DeviceTier
from slackwater.state.image import HostImage
from slackwater.state.manager import StateManager
from slackwater.state.port import About

_GIB = 1 << 30
_FULL, _BASE, _ADAPTER = 1_720_000_000, 8_190_000_000, 43_600_000  # elements; LoRA of rank 16


class SummedBody:
    """Holds a deployment's tensors; a few operations change what is not frozen; sums of all bits
    are compared at every return.
    """

    def __init__(self, roles: Mapping[StateKey, PartRole], seed: int) -> None:
        self.roles = roles
        self.seed = seed
        self.tensors: dict[StateKey, Tensor] = {}
        self.sums: dict[StateKey, int] = {}
        self.differing = self.compared = 0
        self.checked = True

    def bind(self, tensors: Mapping[StateKey, Tensor], about: About) -> None:
        self.tensors = dict(tensors)
        self.checked = False
        if not about:
            self.fill()

    def unbind(self) -> About:
        self.tensors = {}
        return {"filled": True}

    def fill(self) -> None:
        for number, tensor in enumerate(self.tensors.values()):
            made = torch.Generator(tensor.device).manual_seed(self.seed * 100 + number)
            tensor.view(torch.uint8).random_(0, 256, generator=made)

    def check(self) -> None:
        """Outside the measured time: what came back is what left."""
        for key, tensor in self.tensors.items():
            if key in self.sums:
                self.compared += 1
                self.differing += bit_sum(tensor) != self.sums[key]

    def operate(self) -> None:
        """A stand-in for a step: every kept element changes; then the sums that must come back."""
        for key, tensor in self.tensors.items():
            if self.roles[key] is PartRole.KEPT:
                tensor.view(torch.uint8).add_(1)
        self.sums = {key: bit_sum(tensor) for key, tensor in self.tensors.items()}


def bit_sum(tensor: Tensor) -> int:
    """A position-dependent sum of all bits, made where the tensor is."""
    words = tensor.view(torch.uint8)
    words = words[: len(words) // 8 * 8].view(torch.int64)
    total = 0
    for number, piece in enumerate(torch.split(words, 1 << 27)):
        places = torch.arange(1, len(piece) + 1, device=piece.device)
        total ^= int((piece * places).sum()) * (2 * number + 1) & 0xFFFFFFFFFFFFFFFF
    return total


def lora_parts(job: str, scale: float) -> list[StoredPart]:
    base, adapter = int(_BASE * scale) // 64 * 64, int(_ADAPTER * scale) // 64 * 64
    parts = [_part(job, "adapter", "live", adapter, "bfloat16", 2)]
    parts += [
        _part(job, "adapter", kind, adapter, "float32", 4)
        for kind in ("weight", "moment1", "moment2")
    ]
    return [*parts, _part(job, "base", "frozen", base, "bfloat16", 2, PartRole.FROZEN)]


def full_parts(job: str, scale: float) -> list[StoredPart]:
    size = int(_FULL * scale) // 64 * 64
    parts = [_part(job, "net", "live", size, "bfloat16", 2)]
    return parts + [
        _part(job, "net", kind, size, "float32", 4) for kind in ("weight", "moment1", "moment2")
    ]


def _part(
    job: str, name: str, kind: str, size: int, dtype: str, each: int, role: PartRole = PartRole.KEPT
) -> StoredPart:
    return StoredPart(StateKey(job, name, name, kind, 0, size), dtype, each, role)


class Bench:
    """The deployments, the manager, and clocks."""

    def __init__(self, device: str, scale: float, folder: Path) -> None:
        self.device = device
        self.parts = {f"lora{n}": lora_parts(f"lora{n}", scale) for n in range(2)}
        self.parts |= {f"full{n}": full_parts(f"full{n}", scale) for n in range(2)}
        self.bytes = {n: sum(p.bytes for p in parts) for n, parts in self.parts.items()}
        self.kept = {
            n: sum(p.bytes for p in parts if p.role is PartRole.KEPT)
            for n, parts in self.parts.items()
        }
        room = self.bytes["lora0"] + self.bytes["full0"] + (64 << 20)
        budgets = StateBudgets(room, sum(self.bytes.values()) + (64 << 20))
        self.manager = StateManager(budgets, folder)
        self.tier = DeviceTier(self.manager, "gpu", room, device)
        self.manager.attach("gpu", self.tier)
        self.bodies: dict[str, SummedBody] = {}
        for seed, (name, parts) in enumerate(self.parts.items()):
            self.bodies[name] = SummedBody({part.key: part.role for part in parts}, seed)
            self.tier.add(name, parts, self.bodies[name])
            with self.tier.use(name):
                self.bodies[name].operate()
            self.tier.evict(name)

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def timed(self, name: str) -> tuple[float, float]:
        """Seconds to bring a deployment to the device, and to take it back."""
        self.wait()
        began_s = time.perf_counter()
        self.manager.ensure(name, Tier.DEVICE)
        there_s = time.perf_counter()
        with self.tier.use(name):
            self.bodies[name].check()
            self.bodies[name].operate()
            self.wait()
        back_s = time.perf_counter()
        self.tier.evict(name)
        return there_s - began_s, time.perf_counter() - back_s

    def beside(self, name: str, work: "Work") -> dict[str, float]:
        """A load and a save beside a running operation: how long each takes, and what it does to
        the operation.
        """
        alone_s = work.seconds()
        self.wait()
        work.start()
        began_s = time.perf_counter()
        self.manager.tell(NextHinted(time.monotonic(), (name,)))
        self.manager.ensure(name, Tier.DEVICE)
        load_s = time.perf_counter() - began_s
        self.tier.evict(name)
        moved_s = time.perf_counter() - began_s
        busy_s = work.finish()
        return {
            "load_s": load_s,
            "save_s": moved_s - load_s,
            "op_alone_s": alone_s,
            "op_beside_s": busy_s,
            "moves_inside_op": float(moved_s < busy_s),
        }

    def both_ways(self) -> float:
        """Seconds for one deployment to leave while another comes, started together."""
        self.manager.ensure("full0", Tier.DEVICE)
        self.wait()
        began_s = time.perf_counter()
        # It fits beside: its load begins now.
        self.manager.tell(NextHinted(time.monotonic(), ("lora0",)))
        self.tier.evict("full0")
        self.manager.ensure("lora0", Tier.DEVICE)
        taken_s = time.perf_counter() - began_s
        self.tier.evict("lora0")
        return taken_s

    def close(self) -> None:
        self.tier.close()
        self.manager.close()


class Work:
    """Matrix products on the default stream, enough of them to last longer than a move."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device = device
        side = 16384 if device.startswith("cuda") else 256
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.left = torch.randn(side, side, device=device, dtype=dtype)
        self.rounds = 8
        self.seconds()
        once_s = self.seconds() / self.rounds
        self.rounds = max(int(seconds / once_s), 8)
        self.began_s = 0.0

    def start(self) -> None:
        self.began_s = time.perf_counter()
        for _ in range(self.rounds):
            torch.mm(self.left, self.left)

    def finish(self) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.default_stream().synchronize()
        return time.perf_counter() - self.began_s

    def seconds(self) -> float:
        self.start()
        return self.finish()


def copy_speeds(device: str, size: int) -> tuple[float, float]:
    """Bytes per second of one long copy in and out, pinned on CUDA: the limit that the moves are
    held against.
    """
    from slackwater.state.device import ByteRun, copies_for

    with contextlib.ExitStack() as held:
        image = HostImage.create("limit", size)
        held.callback(image.close)
        copies = copies_for(device)
        held.callback(copies.forget, image)
        block = torch.empty(size, dtype=torch.uint8, device=device)
        run = [ByteRun(image, 0, 0, size)]
        times: dict[str, list[float]] = {"in": [], "out": []}
        for _ in range(6):
            began_s = time.perf_counter()
            copies.load(block, run)
            middle_s = time.perf_counter()
            copies.save(block, run, copies.fence())
            times["in"].append(middle_s - began_s)
            times["out"].append(time.perf_counter() - middle_s)
        return size / min(times["in"][1:]), size / min(times["out"][1:])


@contextlib.contextmanager
def bench(device: str, scale: float) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        made = Bench(device, scale, Path(folder))
        try:
            yield made
        finally:
            made.close()


def measure(device: str, scale: float, switches: int) -> dict[str, Any]:
    copy_in, copy_out = copy_speeds(device, max(int(8 * _GIB * scale), 1 << 20))
    found: dict[str, Any] = {"copy_in_gb_s": copy_in / 1e9, "copy_out_gb_s": copy_out / 1e9}
    began_s = time.perf_counter()
    with bench(device, scale) as made:
        found["prepared_s"] = time.perf_counter() - began_s
        names = sorted(made.parts)
        loads: dict[str, list[float]] = {name: [] for name in names}
        saves: dict[str, list[float]] = {name: [] for name in names}
        for number in range(switches):
            name = names[number % len(names)]
            load_s, save_s = made.timed(name)
            loads[name].append(load_s)
            saves[name].append(save_s)
        for name in names:
            up = made.bytes[name] / statistics.median(loads[name])
            down = made.kept[name] / statistics.median(saves[name])
            found[name] = {
                "bytes": made.bytes[name],
                "written_back_bytes": made.kept[name],
                "load_ms": statistics.median(loads[name]) * 1e3,
                "save_ms": statistics.median(saves[name]) * 1e3,
                "to_device_over_copy": up / copy_in,
                "to_host_over_copy": down / copy_out,
            }
        load_s = statistics.median(loads["full0"])
        save_s = statistics.median(saves["full0"])
        beside = made.beside("full0", Work(device, 2.5 * (load_s + save_s)))
        found["beside"] = beside | {
            "load_over_alone": beside["load_s"] / load_s,
            "save_over_alone": beside["save_s"] / save_s,
            "op_slowdown": beside["op_beside_s"] / beside["op_alone_s"],
        }
        both_s = made.both_ways()
        alone_s = statistics.median(loads["lora0"]) + save_s
        found["both_ways_s"], found["one_after_other_s"] = both_s, alone_s
        found["switches"] = switches
        found["tensors_compared"] = sum(body.compared for body in made.bodies.values())
        found["tensors_differing"] = sum(body.differing for body in made.bodies.values())
    large = [found[name] for name in ("full0", "full1")]
    found["to_device_over_copy"] = min(
        found[name]["to_device_over_copy"] for name in ("full0", "full1", "lora0", "lora1")
    )
    found["to_host_over_copy"] = min(each["to_host_over_copy"] for each in large)
    found["bits_equal"] = found["tensors_differing"] == 0 and found["tensors_compared"] > 0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Warm switches on a GPU.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--switches", type=int, default=50)
    parser.add_argument("--scale", type=float, default=1.0, help="of the states' sizes")
    options = parser.parse_args()
    found = measure(options.device, options.scale, options.switches)
    sys.stdout.write(json.dumps({"name": "switch_gpu", "figures": found}) + "\n")


if __name__ == "__main__":
    main()
