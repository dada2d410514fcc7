"""`slackwater up` that does not start leaves nothing; `--dry-run` makes nothing."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from slackwater.cli import agent as agent_command
from slackwater.cli import down as down_command
from slackwater.cli import status as status_command
from slackwater.cli import up as up_command
from slackwater.cli.background_start import removing_failed_start
from slackwater.cli.preflight import check_room
from slackwater.cli.service_process import service_url
from slackwater.model.errors import ConfigError, RefusedError, UnavailableError
from slackwater.runtime.live_driver import Recording
from slackwater.runtime.store.database import Store
from slackwater.serve.http.server import bind
from slackwater.wire.join_token import write_token

BARE = ("--engines", "0", "--trainers", "0", "--sandboxes", "1", "--sandbox-backend", "process")


@pytest.mark.parametrize("behind", [(), ("--background",)])
def test_a_start_on_a_taken_port_leaves_no_file(tmp_path: Path, behind: tuple[str, ...]) -> None:
    state = tmp_path / "state"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "slackwater", "up", "--state", str(state), "--port", port]
        ended = subprocess.run(
            [*command, *BARE, *behind], capture_output=True, text=True, timeout=120, check=False
        )
    assert ended.returncode in (1, 2)
    assert port in ended.stderr
    assert not state.exists(), sorted(state.rglob("*"))


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "x" * 300])
def test_a_host_that_is_not_here_is_named_at_once(host: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(RefusedError, match=r"--host: .* give an address of this machine"):
        bind(host, 18_124)
    assert time.monotonic() - began_s < 30


def test_a_record_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "none" / "run")
    with pytest.raises(ConfigError, match=r"--record: .*none/run' cannot be written"):
        recording.writer("fleet")


def test_the_url_of_an_ipv6_address_has_brackets() -> None:
    assert service_url("::1", 8123) == "http://[::1]:8123"


def test_ctrl_c_stops_a_service_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slackwater", "up", "--state", str(tmp_path / "state")]
    with subprocess.Popen(
        [*command, "--port", "0", *BARE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None
        while not service.stdout.readline().startswith("stop with Ctrl-C"):
            assert service.poll() is None
        wait_for_worker(tmp_path / "state" / "logs" / "service.log")
        service.send_signal(signal.SIGINT)
        _, said = service.communicate(timeout=120)
    assert service.returncode == 130
    lines = [line for line in said.splitlines() if not line.startswith("WARNING: actions are not")]
    assert lines == ["stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("reached", ["lock", "logs/service.log"])
def test_a_start_that_is_interrupted_leaves_no_file(
    tmp_path: Path, number: signal.Signals, reached: str
) -> None:
    state = tmp_path / "state"
    with start_up(state) as service:
        wait_until((state / reached).exists)
        service.send_signal(number)
        _, said = service.communicate(timeout=120)
    assert service.returncode == 128 + number
    assert "Traceback" not in said
    assert not state.exists(), sorted(state.rglob("*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_start_in_the_background_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    state = tmp_path / "state"
    with start_up(state, "--background") as starter:
        wait_until((state / "lock").exists)
        starter.send_signal(number)
        starter.communicate(timeout=120)
    assert starter.returncode == 128 + number
    assert not state.exists(), sorted(state.rglob("*"))


def test_down_stops_a_service_that_is_starting(tmp_path: Path) -> None:
    state = tmp_path / "state"
    runner = CliRunner()
    with start_up(state) as service:
        wait_until(lambda: (state / "lock").exists() and bool((state / "lock").read_text()))
        asked = runner.invoke(status_command.app, ["--state", str(state)])
        ended = runner.invoke(down_command.app, ["--state", str(state)])
        service.communicate(timeout=120)
    assert f"(pid {service.pid}) is starting or stopping; try again soon" in asked.output
    assert ended.output == "stopped\n" and not state.exists()


def start_up(state: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slackwater", "up", "--state", str(state), "--port", "0"]
    return subprocess.Popen(
        [*command, *BARE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )


def heed_interrupts() -> None:
    """Tests in the background of a shell ignore Ctrl-C, and so would what they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_until(ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_fleet_of_this_machine_is_ready_when_its_agents_have_joined(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        'listen = "[::1]:0"\n[[pools]]\nname = "p"\nengines = 0\nsandboxes = 1\n'
        '[[nodes]]\nname = "n"\npool = "p"\n'
    )
    state = ("--state", str(tmp_path / "state"))
    command = [sys.executable, "-m", "slackwater"]
    started = [*command, "up", *state, "--port", "0", *BARE, "--fleet", str(fleet), "--background"]
    ended = subprocess.run(started, capture_output=True, text=True, timeout=300, check=False)
    subprocess.run([*command, "down", *state], capture_output=True, timeout=120, check=True)
    assert ended.returncode == 0, ended.stderr
    assert "ready: every worker is up" in ended.stdout and "is away" not in ended.stderr


def wait_for_worker(log: Path) -> None:
    deadline_s = time.monotonic() + 120
    while "role=sandbox" not in log.read_text():
        assert time.monotonic() < deadline_s, log.read_text()
        time.sleep(0.05)


def test_a_database_that_is_not_there_is_named_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    store = Store("postgresql://127.0.0.1:1/x")
    with pytest.raises(UnavailableError, match=r"cannot be opened: .*refused") as error:
        asyncio.run(store.open())
    assert "\n" not in str(error.value) and "sqlalche.me" not in str(error.value)


def test_a_damaged_database_is_named_with_a_fix_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "slackwater.db"
    file.write_bytes(b"no database " * 300)
    store = Store(f"sqlite:///{file}")
    with pytest.raises(UnavailableError, match=r"not a database; .* give another --state"):
        asyncio.run(store.open())
    assert file.read_bytes() == b"no database " * 300


@pytest.mark.parametrize("url", ["foo", "mysql://here/x"])
def test_a_database_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"--database: '{url}' must be a URL such as sqlite"):
        Store(url)


def test_a_full_disk_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_room(tmp_path / "state" / "below")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(RefusedError, match=r"--state: .* 4 KiB free; free some space"):
        check_room(tmp_path / "state" / "below")


@pytest.mark.parametrize("below", ["file/of/a/node", f"{'x' * 300}/a"])
def test_a_nodes_directory_that_cannot_be_made_is_named_at_the_start(
    tmp_path: Path, below: str
) -> None:
    (tmp_path / "file").touch()
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        '[[pools]]\nname = "p"\nengines = 0\nsandboxes = 1\n'
        f'[[nodes]]\nname = "n"\npool = "p"\ndirectory = "{tmp_path}/{below}"\n'
    )
    options = ["--fleet", str(fleet), "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(up_command.app, options)
    said = str(result.exception)
    assert said.startswith(f"nodes: n: directory: '{tmp_path}/{below[:9]}")
    assert " cannot be written (" in said and said.endswith(
        "; name a folder that this user can make"
    )
    assert not (tmp_path / "state").exists()


def test_an_agents_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    token = {"node": "n", "pool": None, "key": "k", "hub": "127.0.0.1:1", "depot": "", "pin": None}
    (tmp_path / "token").write_text(write_token(token))
    options = ["--join-file", str(tmp_path / "token"), "--directory", str(tmp_path / "file" / "a")]
    result = CliRunner().invoke(agent_command.app, options)
    assert str(result.exception).startswith(f"--directory: '{tmp_path}/file/a' cannot be written")


def test_what_was_there_before_a_failed_start_stays(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{}")
    with pytest.raises(ZeroDivisionError), removing_failed_start(tmp_path) as folder:
        folder.logs.mkdir()
        (folder.logs / "service.log").write_text("began")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["keys.json"]


def test_a_start_on_a_folder_in_use_removes_nothing_of_the_other_service(tmp_path: Path) -> None:
    with removing_failed_start(tmp_path / "state") as folder:
        (folder.root / "slackwater.db").write_text("theirs")
        with pytest.raises(RefusedError), removing_failed_start(folder.root):
            pass
        assert (folder.root / "slackwater.db").is_file()


def test_dry_run_prints_the_settings_also_with_background_and_makes_nothing(
    tmp_path: Path,
) -> None:
    options = ["--state", str(tmp_path / "state"), "--dry-run", "--background", *BARE]
    result = CliRunner().invoke(up_command.app, options, catch_exceptions=False)
    assert result.exit_code == 0 and "sandboxes = 1" in result.output
    assert not (tmp_path / "state").exists()
