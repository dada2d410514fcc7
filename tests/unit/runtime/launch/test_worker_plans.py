"""What workers are told is what their programs take."""

from pathlib import Path

import pytest

from slackwater.runtime.launch.instance_request import VLLM_VARIABLE, InstanceRequest
from slackwater.runtime.launch.worker_plans import WorkerPlans
from slackwater.runtime.settings import ServiceSettings
from slackwater.runtime.store.base_models import BaseModel, BaseModels
from slackwater.worker.vllm.adapter import adapter_parser


def test_a_vllm_adapter_takes_what_every_engine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, "/opt/vllm")
    base = BaseModel("tiny", tmp_path, 300, 512, (), "qwen3")
    settings = ServiceSettings(state=tmp_path, models={"tiny": tmp_path}, kv_mb=4096)
    told = WorkerPlans(settings, BaseModels({"tiny": base})).engine_arguments("tiny")
    _, own = InstanceRequest("tiny", engine="vllm").worker()
    place = ("--connect", "127.0.0.1:1", "--worker", "v", "--files", f"folder:{tmp_path}")
    options = adapter_parser().parse_args([*place, *told, *own])
    assert (options.vllm, options.kv_mb, options.base) == ("/opt/vllm", 4096, "tiny")
