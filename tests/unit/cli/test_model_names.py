"""A model is found under its usual names, and what fits the machine is listed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from harness.hub_cache import put_in_hub_cache
from slackwater.cli.model import list_models
from slackwater.cli.model_fit import MachineMemory, fit_lines, fit_table
from slackwater.cli.model_names import find_model
from slackwater.model.errors import ConfigError
from slackwater.zoo.sources import StoredModel, find_models
from slackwater.zoo.tiny import make_model

NAME = "acme/Tiny-Chat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_model("tiny", directory)
    return directory


@pytest.fixture
def home(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, offline."""
    put_in_hub_cache(tmp_path / "hf", NAME, model)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SLACKWATER_MODELS", str(tmp_path / "models"))
    return tmp_path


def test_a_hub_name_is_the_snapshot_of_its_cache(home: Path, model: Path) -> None:
    found = find_model(NAME)
    assert found.parent.name == "snapshots"
    assert (found / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert find_model(f"{NAME}@{found.name}") == found


@pytest.mark.parametrize("name", ["acme/none", f"{NAME}@v9"])
def test_a_name_that_is_not_there_is_one_clear_line(home: Path, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_model(name, "--model")
    said = str(caught.value)
    assert said.startswith(f"--model: '{name}' is not in the hub's cache {home}/hf/hub")
    assert "HF_HUB_OFFLINE" in said and "\n" not in said


@pytest.mark.parametrize("name", ["no-such-model", "a/b/c", "acme/", "/acme", "x.gguf", "a b/c"])
def test_what_cannot_be_a_name_is_refused_with_the_forms_that_can(home: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a directory, a \.gguf file, .*ORG/N"):
        find_model(name)


def test_a_directory_and_a_model_of_the_folder_are_taken_as_they_are(
    home: Path, model: Path
) -> None:
    assert find_model(str(model)) == model
    assert find_model("tiny", models=model.parent) == model


def test_a_directory_wins_over_a_hub_name(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "acme").mkdir()
    (home / NAME).symlink_to(model)
    monkeypatch.chdir(home)
    assert find_model(NAME) == Path(NAME)


def test_the_list_has_the_folder_and_the_cache_and_says_what_is_broken(
    home: Path, model: Path
) -> None:
    broken = put_in_hub_cache(home / "hf", "acme/cut", model)
    weights = broken / "model.safetensors"
    weights.resolve().write_bytes(weights.read_bytes()[:-8])
    other = put_in_hub_cache(home / "hf", "acme/gemma", model) / "config.json"
    other.unlink()
    other.write_text('{"model_type": "gemma"}')
    found = {item.name: item for item in find_models(model.parent)}
    assert set(found) == {"tiny", NAME, "acme/cut", "acme/gemma"}
    assert found[NAME].parameters == found["tiny"].parameters > 90_000
    assert "is cut off" in found["acme/cut"].problem
    assert "model_type: 'gemma' must be one of" in found["acme/gemma"].problem


def test_what_fits_is_told_from_the_memory_of_one_device() -> None:
    models = [
        StoredModel("small", Path("/s"), 1 << 30),
        StoredModel("large", Path("/l"), 8 << 30),
        StoredModel("odd", Path("/o"), problem="model_type: 'x' must be one of llama"),
    ]
    table = fit_table(models, MachineMemory("cuda", 20 << 30))
    assert [row["fits"] for row in table] == [
        {"serve": True, "adapter": True, "full": False},
        {"serve": True, "adapter": False, "full": False},
        {"serve": False, "adapter": False, "full": False},
    ]
    on_cpu = fit_table(models, MachineMemory("cpu", 20 << 30))
    assert on_cpu[1]["fits"]["serve"] is False, "fp32 on a CPU"
    lines = list(fit_lines(table, MachineMemory("cuda", 20 << 30)))
    assert lines[0] == "smallest device of this machine: cuda with 20.0 GiB"
    assert "cannot be used: model_type: 'x'" in lines[4]


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "1"}
    environment["SLACKWATER_MODELS"] = str(home / "models")
    return subprocess.run(
        [sys.executable, "-m", "slackwater", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )


def test_the_service_takes_a_hub_name(home: Path) -> None:
    dry = run("up", "--model", NAME, "--dry-run", home=home)
    assert f'"{NAME}" = "{find_model(NAME)}"' in dry.stdout, dry.stdout + dry.stderr
    missing = run("up", "--model", "acme/none", "--dry-run", home=home)
    assert missing.returncode == 2
    assert len(missing.stderr.strip().splitlines()) == 1, missing.stderr
    assert "--model: 'acme/none' is not in the hub's cache" in missing.stderr


def test_the_list_of_the_command_is_json_if_wanted(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list_models(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in listed["models"]] == [NAME]
    assert listed["models"][0]["fits"]["serve"]
