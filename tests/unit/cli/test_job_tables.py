"""Jobs in a terminal: means rather than sums, reasons that fit the stage, hints that exist."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slackwater.cli.job_tables import job_facts, job_list
from slackwater.cli.running_service import ask_service, find_service
from slackwater.model.errors import UnavailableError

ROW: dict[str, Any] = {
    **{"job": "default/one", "stage": "running", "reason": "", "device_s": 2.0, "tokens": 10},
    **{"turns": 100, "turns_waited_s": 50.0, "operations": 4, "operations_waited_s": 2.0},
}


def drawn(what: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(what)
    return out.getvalue()


def test_waiting_is_shown_as_a_mean() -> None:
    listed = drawn(job_list([ROW, ROW | {"turns": 0, "operations": 0}]))
    assert "mean wait s" in listed and " 0.50" in listed
    shown = drawn(job_facts(ROW))
    assert "0.50 s a sample on average, over 100" in shown
    assert "0.50 s a training operation on average, over 4" in shown
    assert "50.00" not in shown


def test_a_command_without_url_is_not_told_that_it_misses_one(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="or give the --state of one"):
        ask_service(tmp_path, "GET", "/slackwater/jobs")
    with pytest.raises(UnavailableError, match="or give the --url and --key of one"):
        find_service(None, None, tmp_path)
