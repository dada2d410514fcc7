"""Trained weights leave a real service by every door: the SDK's command line, the cookbook, our own
command.
"""

import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest
import tinker
import torch
from tinker import types

from .service_process import ServiceProcess

pytestmark = pytest.mark.process

TOKENS = list(b"the tide turns twice a day")


def example() -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(TOKENS[1:])),
            "weights": types.TensorData.from_torch(torch.ones(len(TOKENS) - 1)),
        },
    )


class Learnt:
    """A model after two steps: its saves, and the service's own log-probs of a text."""

    def __init__(self, sdk: tinker.ServiceClient, rank: int) -> None:
        client = sdk.create_lora_training_client(base_model="tiny", rank=rank)
        for _ in range(2):
            client.forward_backward([example()], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        self.state = client.save_state("final").result().path
        self.sampler = client.save_weights_for_sampler("final").result().path
        sampling = sdk.create_sampling_client(model_path=self.sampler)
        scored = sampling.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
        self.ours = torch.tensor([float(value) for value in scored[1:] if value is not None])


@pytest.fixture(scope="module")
def learnt(service: ServiceProcess) -> Callable[[int], Learnt]:
    sdk = tinker.ServiceClient(base_url=service.url, api_key=service.key)
    made = {rank: Learnt(sdk, rank) for rank in (4, 0)}
    return made.__getitem__


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.tensor(TOKENS)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]


def loaded(directory: Path) -> torch.nn.Module:
    import transformers

    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32
    )
    return model


def run(service: ServiceProcess, *command: str) -> None:
    known = {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": service.key}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | known,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def close(found: torch.Tensor, ours: torch.Tensor) -> None:
    torch.testing.assert_close(found, ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rank", [4, 0], ids=["lora", "full"])
def test_an_export_merged_or_whole_is_a_model_with_our_logprobs(
    service: ServiceProcess, learnt: Callable[[int], Learnt], tmp_path: Path, rank: int
) -> None:
    out = tmp_path / "model"
    run(service, "slackwater", "model", "export", learnt(rank).sampler, str(out), "--merge")
    close(logprobs(loaded(out)), learnt(rank).ours)


def test_an_exported_training_state_is_an_adapter_for_peft(
    service: ServiceProcess, learnt: Callable[[int], Learnt], tiny_model: Path, tmp_path: Path
) -> None:
    import peft

    out = tmp_path / "adapter"
    run(service, "slackwater", "model", "export", learnt(4).state, str(out))
    close(logprobs(peft.PeftModel.from_pretrained(loaded(tiny_model), out)), learnt(4).ours)


def test_the_sdk_downloads_an_adapter_for_peft(
    service: ServiceProcess, learnt: Callable[[int], Learnt], tiny_model: Path, tmp_path: Path
) -> None:
    import peft

    run(
        service,
        *("tinker.cli", "checkpoint", "download", learnt(4).state, "--output", str(tmp_path)),
    )
    adapter = next(tmp_path.rglob("adapter_config.json")).parent
    close(logprobs(peft.PeftModel.from_pretrained(loaded(tiny_model), adapter)), learnt(4).ours)


def test_an_older_sdk_downloads_one_archive(
    service: ServiceProcess, learnt: Callable[[int], Learnt], tiny_model: Path, tmp_path: Path
) -> None:
    """It asks without following redirects, and reads the link and its end from the headers."""
    import peft

    path = learnt(4).sampler.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    answer = service.get(f"/api/v1/training_runs/{path}/archive")
    assert answer.status_code == 302
    assert parsedate_to_datetime(answer.headers["expires"]).timestamp() > time.time()
    whole = httpx.get(answer.headers["location"], timeout=240)
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as archive:
        assert "checkpoint_complete" in archive.getnames()
        archive.extractall(tmp_path, filter="data")
    close(logprobs(peft.PeftModel.from_pretrained(loaded(tiny_model), tmp_path)), learnt(4).ours)


def test_the_cookbook_downloads_an_encrypted_export_and_merges_it(
    service: ServiceProcess,
    learnt: Callable[[int], Learnt],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinker_cookbook import weights

    from slackwater.zoo.exported import write_untied

    monkeypatch.setenv("TINKER_API_KEY", service.key)
    adapter, base, out = tmp_path / "adapter", tmp_path / "base", tmp_path / "out"
    weights.download(tinker_path=learnt(4).state, output_dir=str(adapter), base_url=service.url)
    write_untied(tiny_model, base)
    weights.build_hf_model(base_model=str(base), adapter_path=str(adapter), output_path=str(out))
    close(logprobs(loaded(out)), learnt(4).ours)


def test_a_path_that_is_not_there_is_one_line(service: ServiceProcess, tmp_path: Path) -> None:
    known = {"TINKER_BASE_URL": service.url, "TINKER_API_KEY": service.key}
    path = "tinker://nobody/sampler_weights/none"
    done = subprocess.run(
        [sys.executable, "-m", "slackwater", "model", "export", path, str(tmp_path / "x")],
        env=os.environ | known,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("slackwater: checkpoint tinker://nobody")
    assert not (tmp_path / "x").exists()
