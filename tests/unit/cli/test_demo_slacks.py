"""The load and the table of `slackwater demo --slacks`, against a small HTTP server."""

import json
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console

from slackwater.cli.demo_slacks import ServedLoad, slack_options, slack_table

ASKED_ALONE = 6


class Answers(BaseHTTPRequestHandler):
    """Answers a prompt with its own tokens; one request after the first six differs, one fails."""

    asked = 0

    def do_POST(self) -> None:
        kind = type(self)
        kind.asked += 1
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = str(body["prompt"]) + ("!" if kind.asked == ASKED_ALONE + 2 else "")
        said = json.dumps({"choices": [{"text": text}]}).encode()
        self.send_response(500 if kind.asked == ASKED_ALONE + 3 else 200)
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""


@pytest.fixture
def url() -> Iterator[str]:
    Answers.asked = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(30)


def test_answers_that_differ_from_those_alone_and_failures_are_counted(url: str) -> None:
    load = ServedLoad(url, "key", pause_s=0.01)
    load.begin()
    deadline_s = time.monotonic() + 60
    while Answers.asked < ASKED_ALONE + 10 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    found = load.end()
    assert (found["different_answers"], found["failed"]) == (1, 1)
    assert found["requests"] >= 9
    assert 0.5 < found["attainment"] < found["attainment_alone"] == 1.0


def test_the_service_of_the_demo_has_nodes_that_send_deltas_and_sandboxes(tmp_path: Path) -> None:
    options = slack_options(tmp_path, tmp_path / "chat")
    assert "--lend" in options
    fleet = tomllib.loads((tmp_path / "fleet.toml").read_text())
    assert len({node["site"] for node in fleet["nodes"]}) == 2
    assert sum(pool.get("sandboxes", 0) for pool in fleet["pools"]) == 1


def test_the_table_says_what_each_kind_gave_and_what_changed() -> None:
    row = {"kind": "spot", "unit": "device h", "alone": 1.0, "used": 1.0}
    result = {
        "slack": [{**row, "saved_dollars": 1.3, "detail": "cheaper"}],
        "served": {"requests": 9, "attainment": 1.0, "different_answers": 0, "failed": 0},
        "jobs": [{"job": "sums", "same_rewards": False}],
        "kinds_seen": 1,
    }
    console = Console(width=200)
    with console.capture() as captured:
        console.print(slack_table(result))
    shown = captured.get()
    assert "spot" in shown and "1.3000" in shown
    assert "rewards alone and together differ: sums" in shown
