"""Job files: what they mean, and what is wrong with one that cannot be."""

from pathlib import Path

import pytest

from slackwater.cli.job import read_job_file
from slackwater.model.errors import ConfigError

WRONG = {
    "slo = 0.5": "slo: 0.5 must be at least 1",
    "sloo = 2": "sloo: unknown key; did you mean slo?",
    "iterations = 0": "iterations: 0 must be above 0",
    "duty_ratio = 1.5": "duty_ratio: 1.5 must be at least 0 and below 1",
    'command = ["true"]': "recipe, command: both are given; give one of them",
    'env = {TINKER_API_KEY = "x"}': "env: 'TINKER_API_KEY' must be the name of a variable",
    "[options.grpo]\nstepps = 3": "options: grpo.stepps: unknown key; did you mean steps?",
    "[profile]\nrollout_s = 0\ntrain_s = 1": "profile: rollout_s: 0.0 must be above 0",
}


@pytest.mark.parametrize(("line", "error"), WRONG.items())
def test_a_wrong_line_is_named_with_its_value_and_the_fix(
    tmp_path: Path, line: str, error: str
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'name = "x"\nmodel = "tiny"\nrecipe = "copy-digits"\n{line}\n')
    with pytest.raises(ConfigError) as raised:
        read_job_file(file)
    assert error in str(raised.value)
    assert str(raised.value).startswith(f"{file}: ") and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["..", "../x", "", "a b", ".hidden", "x" * 65])
def test_a_name_must_be_one_that_a_folder_can_have(tmp_path: Path, name: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f'name = "{name}"\nmodel = "tiny"\niterations = 1\ncommand = ["true"]\n')
    with pytest.raises(ConfigError, match="begin with a letter or digit"):
        read_job_file(file)


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_job_file(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_job_file(broken)


def test_a_command_runs_beside_its_file_and_a_recipe_says_how_long_it_is(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('name = "x"\nmodel = "tiny"\niterations = 3\ncommand = ["true"]\n')
    assert read_job_file(file)["workdir"] == str(tmp_path)
    file.write_text('name = "x"\nmodel = "tiny"\nrecipe = "copy-digits"\n')
    found = read_job_file(file)
    assert found["iterations"] == 160 and "workdir" not in found


def test_the_examples_are_job_files() -> None:
    files = sorted((Path(__file__).parents[3] / "examples").glob("**/*job*.toml"))
    for file in files:
        assert read_job_file(file)["name"]
