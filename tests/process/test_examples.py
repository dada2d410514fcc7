"""The examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

from .service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("tinker_client.py", "sampled 20 tokens"),
        ("openai_client.py", "streamed"),
        ("own_environment.py", "reward"),
    ],
)
def test_a_client_example_runs(service: ServiceProcess, name: str, last: str) -> None:
    more = ["2"] if name == "own_environment.py" else []
    said = output(EXAMPLES / name, service.url, service.key, *more)
    assert last in said.splitlines()[-1]


def test_the_example_of_a_policy_runs() -> None:
    said = output(EXAMPLES / "own_placement_policy.py")
    assert [line.split()[0] for line in said.splitlines()] == [
        "never_share",
        "group",
        "interleaving",
    ]


def output(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=840, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
