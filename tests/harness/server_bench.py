"""A control plane without its HTTP face, the adapters of engine servers on it, and weight versions
for them.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from harness.direct_worker import offer_models, spawn_directly
from harness.live_fleet import BASE, BASE_VERSION, JOB
from harness.preloaded_programs import AwaitedProgram
from harness.rollout_floor import RolloutFloor
from slackwater.model.ids import TrajectoryId, TurnId, WorkerId
from slackwater.model.sampling import Sampling
from slackwater.model.turn import TurnSpec
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.zoo.tiny import make_model

PROMPT = (72, 101, 108, 108, 111)


def turn(
    name: str, sampling: Sampling, prompt: tuple[int, ...] = PROMPT, version: str = BASE_VERSION
) -> TurnSpec:
    of = (TurnId(name), TrajectoryId(name), JOB)
    return TurnSpec(*of, prompt, sampling, version, base_model=BASE)


async def until(condition: Callable[[], bool]) -> None:
    """Poll; the caller sets the deadline."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


class ServerBench:
    """A floor, the processes on it, and a model with two weight versions."""

    def __init__(self, floor: RolloutFloor, folder: Path) -> None:
        self.floor = floor
        self.folder = folder
        self.model = folder / "model"
        self.processes: list[AwaitedProgram] = []

    async def start(self, name: str, module: str, *arguments: str) -> AwaitedProgram:
        offer_models(self.folder, {BASE: self.model})
        common: tuple[str, ...] = ("--model", f"slackwater:models/{BASE}")
        common += ("--base", BASE, "--base-version", BASE_VERSION)
        plan = WorkerPlan(name, f"slackwater.worker.{module}", common + arguments)
        process = await spawn_directly(
            plan, WorkerId(name), self.floor.connect, self.floor.secret, self.folder
        )
        self.processes.append(process)
        return process

    async def stop(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.wait()

    def publish_other(self, version: str, seed: int = 99) -> Path:
        """Another random model of the same shape, as a published version and as a directory."""
        from slackwater.nets.loading import load_net, net_tensors
        from slackwater.nets.lora import lora_meta
        from slackwater.weights.directory import DirectoryWeightStore

        other = self.folder / version
        make_model("tiny", other, seed=seed)
        store = DirectoryWeightStore(self.folder / "weights")
        store.publish(version, net_tensors(load_net(other)), lora_meta(None))
        return other

    def publish_adapter(self, version: str, seed: int) -> Path:
        """A random adapter as a published version, and as a directory in peft's format."""
        import torch
        from safetensors.torch import save_file

        from slackwater.nets.loading import load_net
        from slackwater.nets.lora import LoraAdapter, LoraSpec, lora_meta
        from slackwater.weights.directory import DirectoryWeightStore

        spec = LoraSpec(8, seed=seed)
        tensors = LoraAdapter.create(spec, load_net(self.model).config).tensors
        draw = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if "lora_B" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.2)
        DirectoryWeightStore(self.folder / "weights").publish(version, tensors, lora_meta(spec))
        folder = self.folder / f"adapter-{version}"
        folder.mkdir()
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(spec.peft_config()))
        return folder
