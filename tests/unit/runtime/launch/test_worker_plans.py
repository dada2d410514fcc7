"""What workers are told is what their programs take."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from slackwater.model.device import CUDA, Device
from slackwater.model.errors import ConfigError
from slackwater.model.ids import NodeId
from slackwater.runtime.launch.fleet_file import FleetFile, FleetNode, FleetPool, RayCluster
from slackwater.runtime.launch.instance_list import PROGRAM_VARIABLES, InstanceRequest
from slackwater.runtime.launch.port import WorkerPlan
from slackwater.runtime.launch.ray_agents import bundle
from slackwater.runtime.launch.worker_plans import WorkerPlans, deployment_requests
from slackwater.runtime.settings import RewardSettings, ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.worker.engine_server.adapter import adapter_parser, run_server
from slackwater.worker.engine_server.sglang import SglangServer
from slackwater.worker.engine_server.vllm import VllmServer


def test_a_vllm_adapter_takes_what_every_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRAM_VARIABLES["vllm"], "/opt/vllm")
    base = BaseModel("tiny", tmp_path, 300, 512, (), "qwen3")
    settings = ServiceSettings(state=tmp_path, models={"tiny": tmp_path}, kv_mb=4096)
    told = WorkerPlans(settings, BaseModels({"tiny": base})).engine_arguments("tiny")
    _, own = InstanceRequest("tiny", engine="vllm").worker()
    place = ("--connect", "127.0.0.1:1", "--worker", "v", "--files", f"folder:{tmp_path}")
    options = adapter_parser().parse_args([*place, *told, *own])
    assert (options.program, options.kv_mb, options.base) == ("/opt/vllm", 4096, "tiny")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_of_a_node_has_all_its_devices_in_one_process(
    engine: Literal["vllm", "sglang"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, shown = tmp_path / "server", tmp_path / "shown"
    program.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $@" > {shown}\n')
    program.chmod(0o755)
    monkeypatch.setenv(PROGRAM_VARIABLES[engine], str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")  # as its agent does
    common = ("--model", "m", "--base", "tiny", "--base-version", "v", "--device", "cuda")
    plan = InstanceRequest("tiny", engine=engine, tp=4).plan("large", common)
    assert plan.layout == "tp=4" and plan.one_process
    (request,) = deployment_requests(NodeId("local"), CUDA, [plan])
    assert request.devices == 4
    place = ("--connect", "127.0.0.1:1", "--worker", "v", "--files", f"folder:{tmp_path}")
    options = adapter_parser().parse_args([*place, *plan.arguments])
    dialect = {"vllm": VllmServer, "sglang": SglangServer}[engine]

    async def started() -> int:
        command = dialect.command(options.program, tmp_path, 1, tmp_path, options)
        async with run_server(*command) as process:
            return await asyncio.wait_for(process.wait(), 240)

    assert asyncio.run(started()) == 0
    visible, _, command = shown.read_text().partition(" ")
    assert visible == "GPU-a,GPU-b,GPU-c,GPU-d" and "--tensor-parallel-size 4" in command


def test_a_server_elsewhere_has_the_devices_that_it_has() -> None:
    with pytest.raises(ConfigError, match="tp: 2 is of the server at http://x"):
        InstanceRequest("tiny", engine="vllm", url="http://x", tp=2)


def plans_of(settings: ServiceSettings, devices: list[Device]) -> Sequence[WorkerPlan]:
    base = BaseModel("tiny", settings.state, 300, 512, (), "qwen3")
    bases = {name: replace(base, name=name) for name in settings.models}
    plans = WorkerPlans(settings, BaseModels(bases))
    (pool,) = settings.whole_fleet.pools
    return plans.plan_node(NodeId("local"), pool, plans.usable(devices, pool))


def gpus(count: int) -> list[Device]:
    return [Device(NodeId("local"), index, CUDA, visible=str(index)) for index in range(count)]


def names(plans: Sequence[WorkerPlan]) -> list[str]:
    return [plan.name for plan in plans]


def test_without_a_number_engines_take_the_devices_that_no_trainer_has(tmp_path: Path) -> None:
    settings = ServiceSettings(state=tmp_path, models={"a": tmp_path, "b": tmp_path}, device="cuda")
    assert names(plans_of(settings, gpus(1))) == ["trainer-0", "engine-0-0", "engine-1-0"]
    found = plans_of(settings, gpus(8))
    engines = [*(f"engine-0-{number}" for number in range(4))]
    engines += [f"engine-1-{number}" for number in range(3)]
    assert names(found) == ["trainer-0", *engines]
    assert {plan.group for plan in found} == {""}
    one = replace(settings, device="cuda:5")
    assert {plan.group for plan in plans_of(one, gpus(8))} == {"local"}
    assert len(plans_of(replace(settings, engines=1), gpus(8))) == 3


def test_a_local_server_shares_with_the_trainer_and_can_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRAM_VARIABLES["vllm"], "/opt/vllm")
    settings = ServiceSettings(
        state=tmp_path,
        models={"tiny": tmp_path},
        engines=0,
        local_engines=1,
        local_engine="vllm",
        device=CUDA,
    )
    (local,) = [plan for plan in plans_of(settings, gpus(2)) if plan.name == "local-0-0"]
    assert local.group == "trainer-0" and local.one_process and not local.grace_s
    place = ("--connect", "127.0.0.1:1", "--worker", "v", "--files", f"folder:{tmp_path}")
    options = adapter_parser().parse_args([*place, *local.arguments])
    assert (options.kind, options.program) == ("local", "/opt/vllm")
    for kind, sleeps in (("local", True), ("dedicated", False)):
        options.kind, folder = kind, tmp_path / kind
        command, _ = VllmServer.command("/opt/vllm", tmp_path, 1, folder, options)
        assert ("--enable-sleep-mode" in command) == sleeps


def test_layouts_spread_deployments_and_local_engines_share_with_trainers(tmp_path: Path) -> None:
    settings = ServiceSettings(
        state=tmp_path,
        models={"a": tmp_path},
        device="cuda",
        local_engines=1,
        trainer_layout="dp=4",
        engine_layout="tp=2",
    )
    requests = deployment_requests(NodeId("local"), CUDA, plans_of(settings, gpus(8)))
    assert [(one.deployment, one.devices, one.group) for one in requests] == [
        ("trainer-0", 4, "trainer-0"),
        ("engine-0-0", 2, ""),
        ("engine-0-1", 2, ""),
        ("local-0-0", 2, "trainer-0"),
    ]


def test_a_rank_needs_room_for_its_part_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(12 << 20))
    (tmp_path / "config.json").write_text('{"torch_dtype": "float32"}')
    settings = ServiceSettings(state=tmp_path, models={"a": tmp_path}, device="cuda")
    assert {plan.memory_mb for plan in plans_of(settings, gpus(2))} == {6}
    spread = replace(settings, trainer_layout="tp=2", engine_layout="tp=3")
    assert [plan.memory_mb for plan in plans_of(spread, gpus(8))] == [3, 2, 2]
    assert plans_of(replace(settings, device="cpu"), [Device(NodeId("local"), 0)])[0].memory_mb == 0


def test_devices_of_reward_services_are_not_given_to_deployments(tmp_path: Path) -> None:
    rewards = RewardSettings(services={"judge": tmp_path}, devices=("cuda:0",))
    settings = ServiceSettings(
        state=tmp_path, models={"a": tmp_path}, device="cuda", rewards=rewards
    )
    assert names(plans_of(settings, gpus(3))) == ["trainer-0", "engine-0-0", "rewards-0"]


def test_a_ray_node_lends_all_its_gpus_where_deployments_need_them() -> None:
    resources = {"CPU": 8.0, "GPU": 4.0}
    assert bundle(resources, RayCluster(), "cpu") == {"CPU": 1.0}
    assert bundle(resources, RayCluster(cores=2.0), CUDA) == {"CPU": 2.0, "GPU": 4}
    assert bundle(resources, RayCluster(gpus=2), CUDA) == {"CPU": 1.0, "GPU": 2}
    assert bundle({"CPU": 8.0}, RayCluster(), CUDA) == {"CPU": 1.0, "GPU": 1}  # so it gets none


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"trainer_layout": "tp=4"}, "trainer_layout: 'tp=4' .* the 2 key/value heads of model a"),
        ({"engine_layout": "tp=4"}, "engine_layout: 'tp=4' .* the 2 key/value heads of model a"),
        ({"engine_layout": "tp=2,dp=2"}, "engine_layout: 'tp=2,dp=2' must be tp alone"),
        ({"trainer_layout": "tp=2", "hidden": 7}, "the 7 hidden units of model a"),
    ],
)
def test_a_layout_that_a_model_cannot_have_is_refused_before_anything_starts(
    layouts: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = {"num_key_value_heads": 2, "intermediate_size": layouts.pop("hidden", 96)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = ServiceSettings(state=tmp_path, models={"a": tmp_path}, device="cuda")
    assert plans_of(replace(settings, trainer_layout="tp=1,dp=4"), gpus(8))
    with pytest.raises(ConfigError, match=message):
        plans_of(replace(settings, **layouts), gpus(8))


@pytest.mark.parametrize(("sites", "told"), [(("", ""), True), (("a", "b"), False)])
def test_trainers_are_told_that_all_nodes_share_a_fast_network(
    sites: tuple[str, str], told: bool, tmp_path: Path
) -> None:
    pool = FleetPool("train", engines=0, trainers=1)
    nodes = tuple(FleetNode(f"n{n}", "train", site=site) for n, site in enumerate(sites))
    fleet = FleetFile(pools=(pool,), nodes=nodes)
    settings = ServiceSettings(state=tmp_path, models={"tiny": tmp_path}, fleet=fleet)
    bases = BaseModels({"tiny": BaseModel("tiny", tmp_path, 300, 512, (), "qwen3")})
    (trainer,) = WorkerPlans(settings, bases).plan_node(NodeId("n0"), pool, [])
    assert ("--one-site" in trainer.arguments) is told
