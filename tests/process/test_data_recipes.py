"""Recipes over a data set against a real service, whose model has a name of the hub."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from harness.hub_cache import put_in_hub_cache
from harness.ports import free_port
from slackwater.rl.grpo import run
from slackwater.rl.recipe import Recipe, load_recipe
from slackwater.rl.run_directory import RunDirectory
from slackwater.rl.sdk_client import closing
from slackwater.rl.supervised import run_supervised

from .service_process import ServiceProcess

pytestmark = pytest.mark.process

NAME = "acme/tiny-chat"
SMALL = [f"model.base={NAME}", "model.lora_rank=0", "model.text=plain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits to repeat, as prompts with answers and as preferences."""
    made = tmp_path_factory.mktemp("data")
    rows = [{"prompt": f"{n % 10}=", "answer": f"{n % 10}"} for n in range(50)]
    pairs = [
        {"prompt": f"{n % 10}=", "chosen": f"{n % 10}", "rejected": f"{(n * 7 + 3) % 10}"}
        for n in range(50)
        if n % 10 != (n * 7 + 3) % 10
    ]
    for name, content in (("rows", rows), ("pairs", pairs)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return made


@pytest.fixture(scope="module")
def service(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tinker.ServiceClient]:
    """`slackwater up --model ORG/NAME`, offline, from a prepared cache."""
    state = tmp_path_factory.mktemp("hub")
    put_in_hub_cache(state / "hf", NAME, tiny_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(state / "hf"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        process = ServiceProcess(state / "state", Path(NAME), free_port(), name=NAME)
        process.start()
    try:
        with closing(tinker.ServiceClient(base_url=process.url, api_key=process.key)) as client:
            yield client
    finally:
        process.stop()


def trained(
    recipe: Recipe, service: tinker.ServiceClient, path: Path
) -> tuple[list[dict[str, float]], str]:
    files = RunDirectory(path, recipe)
    try:
        if recipe.method == "grpo":
            weights = run(recipe, service, files, lambda step, metrics: None)
        else:
            weights = run_supervised(recipe, service, files, lambda step, metrics: None)
    finally:
        files.close()
    return files.metrics(), weights


def test_sft_lowers_the_loss_and_grpo_keeps_near_it_with_a_kl(
    service: tinker.ServiceClient, folder: Path, tmp_path: Path
) -> None:
    data = f"environment.data={folder / 'rows.jsonl'}"
    changes = [*SMALL, data, "supervised.steps=20", "supervised.learning_rate=3e-3"]
    curve, weights = trained(load_recipe("sft", changes), service, tmp_path / "sft")
    assert len(curve) == 20
    assert curve[-1]["loss"] < 0.6 * curve[0]["loss"]
    # Any printable character is paid for, which a random model finds by chance.
    changes = [*SMALL, data, "environment.answer=none", "environment.verifier=regex:[ -~]"]
    changes += ["sampling.max_tokens=2", "grpo.steps=1", "grpo.groups=4", "grpo.max_groups=40"]
    changes += ["grpo.kl=0.1", f"grpo.reference={weights}"]
    far, _ = trained(load_recipe("verified-data", changes), service, tmp_path / "far")
    assert far[0]["optim/updates"] == 1, "no group had differing rewards"
    assert far[0]["reference/kl"] > 0.5, "the base model is not the trained one"
    changes = [c for c in changes if not c.startswith("grpo.reference")]
    near, _ = trained(load_recipe("verified-data", changes), service, tmp_path / "near")
    assert near[0]["reference/kl"] < 1e-3, "the first step samples from the base model itself"


def test_dpo_learns_to_prefer(service: tinker.ServiceClient, folder: Path, tmp_path: Path) -> None:
    changes = [*SMALL, f"environment.data={folder / 'pairs.jsonl'}", "supervised.steps=20"]
    changes += ["supervised.learning_rate=2e-3", "supervised.batch=16"]
    curve, _ = trained(load_recipe("dpo", changes), service, tmp_path / "dpo")
    assert curve[0]["loss"] == pytest.approx(0.693, abs=0.01), "equal to its reference"
    assert curve[-1]["preference/margin"] > 0.2
    assert curve[-1]["loss"] < curve[0]["loss"]
