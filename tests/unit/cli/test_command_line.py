"""The command line: instant help, one-line errors, exit codes that mean something."""

import subprocess
import sys

SLACKWATER = [sys.executable, "-m", "slackwater"]


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SLACKWATER, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_command_and_imports_none_of_them() -> None:
    from slackwater.cli.main import COMMANDS

    shown = call("--help")
    assert shown.returncode == 0
    for name in COMMANDS:
        assert f"  {name} " in shown.stdout
    heavy = "import sys; import slackwater.cli.main; print([m for m in ('torch', 'numpy', 'fastapi') if m in sys.modules])"
    loaded = subprocess.run(
        [sys.executable, "-c", heavy], capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.strip() == "[]"


def test_an_unknown_bench_ends_with_one_line_and_status_2() -> None:
    ended = call("bench", "no-such-bench")
    assert ended.returncode == 2
    assert ended.stderr.startswith("slackwater: NAME: 'no-such-bench' is no bench")
    assert len(ended.stderr.strip().splitlines()) == 1


def test_an_unknown_command_ends_with_status_2() -> None:
    assert call("no-such-command").returncode == 2
