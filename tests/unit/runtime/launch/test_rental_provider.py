"""A provider's commands: what they are given, what is taken from them, how they fail."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from slackwater.model.errors import ConfigError, UnavailableError
from slackwater.model.ids import NodeId
from slackwater.runtime.launch.rental_provider import RentalProvider

NODE = NodeId("spot-rented-0")


def provider(rent: str = "true", release: str = "true", **more: float) -> RentalProvider:
    return RentalProvider("spot", rent, release, more.pop("budget", 1.0), **more)  # type: ignore[arg-type]


def rented(rent: str, token_file: Path = Path("/token")) -> str:
    return asyncio.run(provider(rent).rent_node(NODE, token_file))


def test_the_last_line_is_the_id_and_values_stay_single_words(tmp_path: Path) -> None:
    said = rented("printf '%s\\n' started {node} '<{token_file}>'", tmp_path / "a b; $(x)")
    assert said == f"<{tmp_path}/a b; $(x)>"


def test_a_machine_that_stays_behind_does_not_hold_the_command_up() -> None:
    began_s = time.monotonic()
    machine = int(rented("sh -c 'sleep 600 & echo $!'"))
    os.kill(machine, signal.SIGKILL)
    assert time.monotonic() - began_s < 300


@pytest.mark.parametrize(
    ("rent", "complaint"),
    [
        ("sh -c 'echo no quota >&2; exit 3'", "sh: no quota"),
        ("sh -c 'exit 3'", "status 3"),
        ("true", "printed no id"),
        ("/nowhere/at/all", "No such file"),
    ],
)
def test_a_command_that_fails_says_why(rent: str, complaint: str) -> None:
    with pytest.raises(UnavailableError, match=complaint):
        rented(rent)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"rent": "start {machine}"}, r"providers: spot: rent: '\{machine\}' is unknown"),
        ({"release": "stop {token_file}"}, "release"),
        ({"rent": ""}, "must be a command"),
        ({"rent": "a 'b"}, "is not a command"),
        ({"nodes": 0}, "nodes"),
        ({"budget": 0.0}, "budget"),
        ({"idle_s": float("inf")}, "idle_s"),
    ],
)
def test_what_is_wrong_with_a_provider_is_named(
    fields: dict[str, float | str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        provider(**fields)  # type: ignore[arg-type]
