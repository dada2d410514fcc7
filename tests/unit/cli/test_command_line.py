"""The command line: instant help, one-line errors, exit codes that mean something."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from slackwater.cli.main import COMMANDS, app

SLACKWATER = [sys.executable, "-m", "slackwater"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLACKWATER, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_imports_none_of_them() -> None:
    shown = call("--help")
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in shown.stdout
    heavy = (
        "import sys; import slackwater.cli.main; print([m for m in ('torch', 'numpy', 'fastapi') "
        "if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", heavy], capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_an_unknown_bench_ends_with_one_line_and_status_2() -> None:
    ended = call("bench", "no-such-bench")
    assert ended.returncode == 2
    assert ended.stderr.startswith("slackwater: NAME: 'no-such-bench' is not a benchmark")
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_path_that_cannot_be_is_named_in_one_line() -> None:
    ended = call("up", "--state", f"/tmp/{'x' * 300}")
    assert ended.returncode == 1
    assert "File name too long" in ended.stderr and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "then"),
    [
        ("typer", "raise"),
        ("slackwater.cli.status", "raise"),
        ("slackwater.cli.status", "raise ValueError('as pydantic does') from None"),
    ],
)
def test_ctrl_c_during_an_import_prints_nothing(module: str, then: str) -> None:
    program = f"""
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as from a terminal
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            try: os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt: {then}
sys.meta_path.insert(0, Interrupting())
sys.argv = ["slackwater", "status"]
runpy.run_module("slackwater", run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_an_unknown_command_ends_with_status_2() -> None:
    assert call("no-such-command").returncode == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_one_style_and_flags_take_no_value(name: str) -> None:
    command = get_command(app)
    found = command.get_command(None, name)  # type: ignore[attr-defined]
    below = [[name], *([name, each] for each in getattr(found, "commands", {}))]
    for words in below:
        shown = CliRunner().invoke(app, [*words, "--help"], catch_exceptions=False)
        assert shown.exit_code == 0
        assert shown.output.startswith("Usage: ") and "<bool>" not in shown.output, words
        assert "│" not in shown.output and "--no-" not in shown.output, words


def test_a_shell_completes_commands_and_options() -> None:
    def complete(*words: str) -> list[str]:
        asked = {
            "_SLACKWATER_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(("slackwater", *words)),
            "COMP_CWORD": str(len(words)),
        }
        done = subprocess.run(
            SLACKWATER, capture_output=True, text=True, timeout=60, env=os.environ | asked
        )
        return done.stdout.split()

    assert complete("st") == ["status", "storm"]
    assert sorted(complete("up", "--train-")) == ["--train-dtype"]


def test_the_version_is_that_of_the_installed_package() -> None:
    assert call("--version").stdout == f"slackwater {version('slackwater')}\n"
