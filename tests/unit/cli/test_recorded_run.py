"""`slackwater instance verify` replays a record as the service that made it was configured."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slackwater.cli import instance
from slackwater.cli.demo import two_nodes
from slackwater.control.jobs.events import JobSubmitted
from slackwater.control.lending.events import ServingNodeJoined, ServingNodeReported
from slackwater.control.record import record_line
from slackwater.model.config import decode, plain
from slackwater.model.errors import ConfigError
from slackwater.model.ids import JobId, NodeId, ServiceName, TenantId
from slackwater.model.job import JobProfile, JobTerms
from slackwater.model.toml_text import toml_text
from slackwater.runtime.fleet_controller import new_fleet_controller
from slackwater.runtime.launch.fleet_file import read_fleet_file
from slackwater.runtime.settings import ServiceSettings


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a service that shares nodes and lends: its configuration and its record."""
    (tmp_path / "fleet.toml").write_text(two_nodes())
    table: dict[str, Any] = {
        "state": str(tmp_path),
        "models": {"policy": str(tmp_path), "chat": str(tmp_path)},
        "fleet": plain(read_fleet_file(tmp_path / "fleet.toml")),
        "coschedule": {"placement": "group"},
        "serving": {"model": "chat", "slo": {"ttft_s": 1.0, "tpot_s": 1.0}, "lend": True},
    }
    settings = decode(ServiceSettings, table)
    (tmp_path / "config.toml").write_text(toml_text(plain(settings)))
    terms, node = JobTerms(3, 2.0), NodeId("serving")
    events = (
        JobSubmitted(1.0, JobId("job"), TenantId("me"), JobProfile(10.0, 10.0), terms),
        ServingNodeJoined(2.0, node, ServiceName("chat")),
        ServingNodeReported(3.0, node, 0.1, 0.1),
    )
    controller = new_fleet_controller(settings)
    lines = [record_line(event, controller.handle(event)) for event in events]
    (tmp_path / "record.fleet.jsonl").write_bytes(b"".join(lines))
    return tmp_path


def verified(folder: Path, *options: str) -> dict[str, Any]:
    command = ["verify", "--json", str(folder / "record.fleet.jsonl"), *options]
    found: dict[str, Any] = json.loads(CliRunner().invoke(instance.app, command).output)
    return found


def test_a_record_agrees_under_the_configuration_of_its_service(recorded: Path) -> None:
    found = verified(recorded, "--config", str(recorded / "config.toml"))
    assert found == {"events_agreed": 3, "first_divergence": None}


def test_it_does_not_under_another(recorded: Path) -> None:
    assert verified(recorded)["first_divergence"] == 1


@pytest.mark.parametrize("last", [b'{"event": {"ty', b"[]\n", b"{}\n", b"\xff\n"])
def test_a_record_that_is_cut_off_is_refused_by_its_line(recorded: Path, last: bytes) -> None:
    record = recorded / "record.fleet.jsonl"
    record.write_bytes(record.read_bytes() + last)
    command = ["verify", str(record), "--config", str(recorded / "config.toml")]
    error = CliRunner().invoke(instance.app, command).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("record.fleet.jsonl line 4: is not a line of a record")


def test_a_record_that_cannot_be_read_is_refused_by_its_name(tmp_path: Path) -> None:
    error = CliRunner().invoke(instance.app, ["verify", str(tmp_path)]).exception
    assert isinstance(error, ConfigError)
    assert "cannot be read: Is a directory" in str(error)
