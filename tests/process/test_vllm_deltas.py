"""A live vLLM server under `slackwater up` takes what changed, and samples from it. Name its
program in SLACKWATER_VLLM.
"""

import os
from pathlib import Path

import pytest
import tinker
from tinker import types

from harness.ports import free_port
from slackwater.zoo.tiny import make_model

from .service_process import ServiceProcess, wait_for
from .test_serve_faults import Run, take_step
from .test_weight_relays import fleet_file

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "SLACKWATER_VLLM" not in os.environ,
        reason="no vLLM: set SLACKWATER_VLLM to its program, or run `make test-vllm`",
    ),
]
STEPS = 4
PROMPT = list(b"the sea is")


def names(service: ServiceProcess) -> list[str]:
    """Every instance."""
    found = service.get("/slackwater/instances").json()["instances"]
    return [row["instance"] for row in found]


def trained_logprobs(trainer: tinker.TrainingClient, tokens: list[int]) -> list[float]:
    """What the trainer's own weights say of the tokens after the prompt."""
    targets = tokens[1:]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=targets, dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(
                data=[1.0] * len(targets), dtype="float32", shape=[len(targets)]
            ),
        },
    )
    passed = trainer.forward([datum], "cross_entropy").result(timeout=240)
    found: list[float] = list(passed.loss_fn_outputs[0]["logprobs"].data)
    return found[len(PROMPT) - 1 :]


def quick_to_start(folder: Path, tp: int) -> str:
    """The program, told to compile nothing, to keep a short context, and to run each rank on a
    core (by itself it wants a NUMA node for each).
    """
    wrapper = folder / "vllm"
    options = "--enforce-eager --max-model-len 512"
    cores = "|".join(str(rank) for rank in range(tp))
    program = os.environ["SLACKWATER_VLLM"]
    wrapper.write_text(
        f"#!/bin/sh\nexport VLLM_CPU_OMP_THREADS_BIND='{cores}'\n"
        f'exec "{program}" "$@" {options}\n'
    )
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_server_that_takes_deltas_samples_from_every_version(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("small", tmp_path / "model", 0)
    monkeypatch.setenv("SLACKWATER_VLLM", quick_to_start(tmp_path, tp))
    fleet = fleet_file(tmp_path, "r")
    with fleet.open("a") as last_node:
        last_node.write(f"devices = {1 + tp}\n")  # the embedded engine's and the server's
    options = ("--fleet", str(fleet))
    service = ServiceProcess(tmp_path / "state", tmp_path / "model", free_port(), *options)
    service.start()
    try:
        service.wait_for_workers()
        (own,) = names(service)
        service.post("/slackwater/instances", {"engine": "vllm", "tp": tp})
        wait_for("the server", lambda: service.status()["gauges"]["engines"] == 2, 500)
        service.post(f"/slackwater/instances/{own}/drain", {})
        wait_for("the server alone", lambda: service.status()["gauges"]["engines"] == 1)
        client = tinker.ServiceClient(base_url=service.url, api_key=service.key)
        trainer = client.create_lora_training_client(base_model="tiny", rank=0, seed=3)
        run = Run()
        for step in range(STEPS):
            sampler = trainer.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
            asked = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, params)
            answer = asked.result(timeout=240).sequences[0]
            assert answer.logprobs is not None
            wanted = trained_logprobs(trainer, PROMPT + list(answer.tokens))
            assert list(answer.logprobs) == pytest.approx(wanted, abs=2e-3)
            take_step(run, trainer, sampler, params, answers=2, learning_rate=1e-3)
        gauges = service.status()["gauges"]
        assert gauges["weights_pulls_by_delta"] >= STEPS - 1, gauges
    finally:
        service.stop()
