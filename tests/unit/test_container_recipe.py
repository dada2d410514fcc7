"""The Dockerfile builds what the wheel's check builds, and starts a service that can be."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "Dockerfile").read_text()
WHEEL_CHECK = (ROOT / "scripts" / "check_wheel.sh").read_text()


def test_it_copies_files_that_exist_and_those_that_the_wheel_is_made_of() -> None:
    copied = [line.split()[1:-1] for line in re.findall(r"^COPY (?!--).*$", RECIPE, re.MULTILINE)]
    names = {name for line in copied for name in line}
    assert names and all((ROOT / name).exists() for name in names)
    (packed,) = re.findall(r"ls-files -z (.*?) \|", WHEEL_CHECK)
    assert names == {*packed.split(), "constraints.txt"}


def test_it_builds_and_installs_the_wheel_as_the_check_does() -> None:
    for step in (r"pip wheel -q --no-deps -w", r"pip install -q .*-c \S*constraints\.txt\S*"):
        assert re.search(step, RECIPE) and re.search(step, WHEEL_CHECK), step
    extras = re.compile(r"\*\.whl\)\[([\w,]+)\]")
    assert extras.findall(RECIPE) == extras.findall(WHEEL_CHECK) == ["serve,rl"]


def test_the_command_it_starts_is_one_that_the_service_takes(tmp_path: Path) -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", RECIPE, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.*)$", RECIPE, re.MULTILINE)
    assert json.loads(entry) == ["slackwater"]
    options = [str(tmp_path) if word == "/state" else word for word in json.loads(command)]
    ran = subprocess.run(
        [sys.executable, "-m", "slackwater", *options, "--dry-run"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    (port,) = re.findall(r"^EXPOSE (\d+)$", RECIPE, re.MULTILINE)
    assert f"port = {port}" in ran.stdout and 'host = "0.0.0.0"' in ran.stdout
