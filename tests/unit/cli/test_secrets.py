"""Keys and tokens stand on no command line: they come from files, the environment or the standard
input.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slackwater.wire.join_token import write_token

WITHIN_S = 120
KEY = "0123456789abcdef-the-key-of-the-node"


@contextmanager
def silent_plane() -> Iterator[tuple[socket.socket, str]]:
    """Something that agents can dial, and its token for node `n`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WITHIN_S)
        hub = f"127.0.0.1:{listening.getsockname()[1]}"
        join = {"hub": hub, "depot": "http://127.0.0.1:9", "node": "n", "key": KEY}
        yield listening, write_token(join | {"pool": "mixed", "pin": None})


def slackwater(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "slackwater", *arguments]


@pytest.mark.parametrize("way", ["file", "stdin", "environment"])
def test_an_agent_that_runs_shows_no_secret(tmp_path: Path, way: str) -> None:
    with silent_plane() as (listening, token):
        (tmp_path / "token").write_text(token + "\n")
        given = {"file": ["--join-file", str(tmp_path / "token")], "stdin": ["--join-file", "-"]}
        command = slackwater("agent", *given.get(way, []), "--directory", str(tmp_path / "n"))
        known = {"SLACKWATER_JOIN": token} if way == "environment" else {}
        agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | known,
            text=True,
        )
        try:
            assert agent.stdin is not None
            agent.stdin.write(token + "\n" if way == "stdin" else "")
            agent.stdin.close()
            connection, _ = listening.accept()  # so it knows where, and has become the agent
            with connection:
                shown = Path(f"/proc/{agent.pid}/cmdline").read_bytes()
                connection.settimeout(WITHIN_S)
                said = connection.recv(4096)
        finally:
            agent.kill()
            agent.wait(WITHIN_S)
    assert b"slackwater.worker.agent" in shown
    for secret in (KEY.encode(), token.encode(), token[-40:].encode()):
        assert secret not in shown
        assert secret not in said  # nor does it tell what answers there


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (("agent", "--join", "dG9rZW4="), "--join-file"),
        (("action", "mcp", "--url", "http://127.0.0.1:9", "--key", "tml-secret"), "--key-file"),
        (("agent",), "--join-file"),
        (("agent", "--join-file", "/nowhere/token"), "cannot be read"),
    ],
)
def test_a_secret_on_the_command_line_is_refused_with_what_to_do(
    tmp_path: Path, arguments: tuple[str, ...], fix: str
) -> None:
    clean = {name: value for name, value in os.environ.items() if "SLACKWATER" not in name}
    ended = subprocess.run(
        slackwater(*arguments), capture_output=True, text=True, timeout=WITHIN_S, env=clean
    )
    assert ended.returncode == 2
    assert fix in ended.stderr
    assert "Traceback" not in ended.stderr and "tml-secret" not in ended.stderr
