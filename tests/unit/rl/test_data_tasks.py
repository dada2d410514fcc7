"""Recipes over data sets: rows of several forms, verifiers, and what is refused."""

import json
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slackwater.model.errors import ConfigError
from slackwater.rl.environments.data_tasks import DataTasks, load_verifier, read_rows
from slackwater.rl.environments.episode import EnvironmentReply
from slackwater.rl.recipe import load_recipe

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(5)]


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_json_lines_parquet_and_datasets_are_the_same_rows(tmp_path: Path) -> None:
    import datasets

    lines = write_rows(tmp_path / "a.jsonl")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "split")
    for name, split in (("a.jsonl", "train"), ("a.parquet", "train"), ("plain", "train")):
        assert list(read_rows(str(tmp_path / name), split)) == ROWS
    assert list(read_rows(str(tmp_path / "split"), "test")) == ROWS
    assert DataTasks(str(lines)).prompts == 5


@pytest.mark.parametrize(
    ("verifier", "right", "wrong"),
    [
        ("exact", " 3\n", "it is 3"),
        (r"regex:answer: (\d+)", "answer: 4, no, answer: 3", "answer: 3, no, answer: 4"),
        (r"regex:\d+", "so it is 3", "so it is four"),
    ],
)
def test_a_verifier_pays_for_the_right_answer(
    tmp_path: Path, verifier: str, right: str, wrong: str
) -> None:
    tasks = DataTasks(str(write_rows(tmp_path / "a.jsonl")), verifier=verifier)
    episode = tasks.episode(2)
    assert episode.first_observation == "2+1="
    assert episode.answer(right) == EnvironmentReply("", 1.0, True)
    assert episode.answer(wrong) == EnvironmentReply("", 0.0, True)


def test_a_pattern_alone_pays_for_a_match() -> None:
    verify = load_verifier(r"regex:^<a>.*</a>$", "none")
    assert [verify("<a>x</a>", {}), verify("x", {})] == [1.0, 0.0]


def test_a_function_of_ones_own_sees_the_answer_and_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "def near(text, row):\n    return 1 / (1 + abs(int(text) - int(row['answer'])))\n"
    (tmp_path / "my_rewards.py").write_text(source + "def odd(text, row):\n    return text\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    tasks = DataTasks(str(write_rows(tmp_path / "a.jsonl")), verifier="my_rewards:near")
    assert tasks.episode(0).answer("2").reward == 0.5
    with pytest.raises(ConfigError, match="my_rewards:odd' must return a finite number, not '2'"):
        load_verifier("my_rewards:odd", "answer")("2", {})
    with pytest.raises(ConfigError, match="my_rewards:none' cannot be imported"):
        load_verifier("my_rewards:none", "answer")


@pytest.mark.parametrize("name", ["", "best", "regex:", "regex:(", "no_such_module:f", ":f", "x:"])
def test_what_is_no_verifier_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.verifier"):
        load_verifier(name, "answer")


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    tasks = DataTasks(str(write_rows(tmp_path / "a.jsonl")), prompt="question")
    with pytest.raises(ConfigError, match=r"is not a column of .*; it has prompt, answer"):
        tasks.episode(0)


def test_messages_are_a_prompt_and_the_last_one_is_the_answer(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": said}))
    tasks = DataTasks(str(tmp_path / "chat.jsonl"))
    assert tasks.demonstration(0) == ((said[:1], "hello"),)


@given(st.binary(max_size=80))
@settings(max_examples=80)
def test_any_bytes_are_rows_or_one_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.jsonl", "a.parquet"):
            file = Path(folder) / name
            file.write_bytes(content)
            try:
                assert read_rows(str(file))
            except ConfigError as error:
                assert str(error).startswith("data: ")


def test_a_supervised_recipe_needs_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'environment\.kind: .* must be "data" for method'):
        load_recipe("copy-digits", ["method=sft"])
    with pytest.raises(ConfigError, match=r"environment\.data: '' must name a data set: --data"):
        read_rows(load_recipe("sft").environment.data)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_rows(str(tmp_path / "none.jsonl"))
