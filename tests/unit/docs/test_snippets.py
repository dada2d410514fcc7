"""Every snippet works: Python runs, TOML is read by its reader, commands exist with their options.

A fence may have a comment above it. Python with `<!-- needs a service -->` is compiled and its
imports are resolved. TOML says who reads it: `<!-- toml: service -->`, `fleet`, `instances`, `job`,
`scenario`, `plan fleet`, `recipe`.
"""

import ast
import importlib
import importlib.util
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import ROOT, Block, every_block

from slackwater.cli.main import COMMANDS, app

NEEDS_A_SERVICE = "needs a service"
# Commands that need no service and no data: the examples of them are run.
PURE = ("plan", "sim list", "sim run quickstart", "train list", "model list", "rollout list")


def ids(blocks: list[Block]) -> list[str]:
    return [block.place for block in blocks]


PYTHON = every_block("python")
TOML = every_block("toml")


@pytest.mark.parametrize("block", [b for b in PYTHON if not b.marker], ids=lambda b: b.place)
def test_python_runs(block: Block, tmp_path: Path) -> None:
    env = os.environ | {"SLACKWATER_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", block.text]
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{block.place}: {done.stderr}"


@pytest.mark.parametrize("block", [b for b in PYTHON if b.marker], ids=lambda b: b.place)
def test_python_that_needs_a_service_compiles_and_imports(block: Block) -> None:
    assert block.marker == NEEDS_A_SERVICE, f"{block.place}: {block.marker}"
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                resolve(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                resolve(str(node.module), alias.name)


def resolve(module: str, name: str | None = None) -> None:
    """Ours is imported; of other packages it is enough, and much faster, that they are there."""
    if module.split(".")[0] != "slackwater":
        assert importlib.util.find_spec(module) is not None, module
    else:
        found = importlib.import_module(module)
        assert name is None or hasattr(found, name), f"{module}.{name}"


def read_service(text: str, file: Path) -> None:
    from slackwater.model.config import decode
    from slackwater.runtime.settings import ServiceSettings

    decode(ServiceSettings, {"state": str(file.parent), "models": {}} | tomllib.loads(text))


def read_job(text: str, file: Path) -> None:
    from slackwater.cli.job import read_job_file

    read_job_file(file)


def read_fleet(text: str, file: Path) -> None:
    from slackwater.runtime.launch.fleet_file import read_fleet_file

    read_fleet_file(file)


def read_instances(text: str, file: Path) -> None:
    from slackwater.runtime.launch.instance_list import read_instance_list

    read_instance_list(file)


def read_scenario(text: str, file: Path) -> None:
    from slackwater.sim.inputs.scenario_file import read_scenario

    read_scenario(str(file))[0].scenario(file.parent)


def read_plan_fleet(text: str, file: Path) -> None:
    from slackwater.sim.inputs.scenario_file import read_fleet

    read_fleet(file)


def read_recipe(text: str, file: Path) -> None:
    from slackwater.rl.recipe import load_recipe

    load_recipe(str(file))


READERS: dict[str, Callable[[str, Path], None]] = {
    "service": read_service,
    "fleet": read_fleet,
    "instances": read_instances,
    "job": read_job,
    "scenario": read_scenario,
    "plan fleet": read_plan_fleet,
    "recipe": read_recipe,
}


@pytest.mark.parametrize("block", TOML, ids=lambda b: b.place)
def test_toml_is_read_by_its_reader(block: Block, tmp_path: Path) -> None:
    kind = block.marker.removeprefix("toml: ")
    assert kind in READERS, f"{block.place}: say above the fence who reads it: <!-- toml: ... -->"
    file = tmp_path / "example.toml"
    file.write_text(block.text, encoding="utf-8")
    READERS[kind](block.text, file)


def commands(block: Block) -> Iterator[list[str]]:
    """The `slackwater` commands of a block, as lists of arguments."""
    text = block.text.replace("\\\n", " ")
    for line in text.split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        words: list[str] = []
        try:
            found = list(lexer)
        except ValueError:
            continue  # prose that happens to be indented
        for word in [*found, ";"]:
            if word and set(word) <= set(";&|<>"):
                yield from _command(words)
                words = []
            else:
                words.append(word)


def _command(words: list[str]) -> Iterator[list[str]]:
    words = words[1:] if words[:1] == ["$"] else words
    while words and "=" in words[0] and words[0].split("=")[0].isidentifier():
        words = words[1:]
    if words[:1] == ["slackwater"] and len(words) > 1:
        yield words[1:]


SHELL = every_block("bash", "console", "sh", "", "indented")
LINES = sorted({tuple(words) for block in SHELL for words in commands(block)})


def parse(arguments: tuple[str, ...]) -> None:
    """UsageError unless the command and all its options exist; nothing is run."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("slackwater", ["up"], resilient_parsing=True)
    rest = list(arguments)
    while hasattr(command, "get_command"):
        assert rest, f"{arguments} ends before its command"
        name = rest.pop(0)
        if name in ("--help", "--version"):
            return
        command = command.get_command(context, name)
        assert command is not None, f"{arguments}: there is no command {name}"
        if hasattr(command, "get_command"):
            context = command.make_context(name, [], parent=context, resilient_parsing=True)
    if "--help" not in rest:
        command.make_context(name, rest, parent=context)


def test_every_example_names_a_command_and_options_that_exist() -> None:
    wrong = []
    for line in LINES:
        try:
            parse(line)
        except Exception as error:  # noqa: BLE001 - whatever typer raises is the finding
            wrong.append(f"slackwater {shlex.join(line)}: {getattr(error, 'message', error)}")
    assert not wrong, "\n".join(wrong)


def test_every_command_has_an_example() -> None:
    assert {line[0] for line in LINES} >= set(COMMANDS)


RUN = [
    line
    for line in LINES
    if (" ".join(line).startswith(PURE) and "--joint" not in line) or "--dry-run" in line
]


@pytest.mark.parametrize("line", RUN, ids=lambda line: " ".join(line))
def test_examples_that_need_nothing_run(
    line: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLACKWATER_MODELS", str(tmp_path / "models"))
    words = list(line)
    while "--plot" in words:  # drawing is slow, and has tests of its own
        del words[words.index("--plot") : words.index("--plot") + 2]
    try:
        typer.main.get_command(app).main(words, standalone_mode=False)
    except typer.Exit as ended:
        assert ended.exit_code == 0


def test_every_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for block in SHELL:
        for line in block.text.split("\n"):
            words = line.split("#")[0].split()
            if words[:1] == ["make"] and len(words) > 1:
                assert f"\n{words[1]}:" in makefile, f"{block.place}: make {words[1]}"
