"""Workers that are forked from a process that has imported their modules."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slackwater.sandbox.process_tree import children, is_alive
from slackwater.wire.agent import PARENT, SECRET
from slackwater.worker.template import WorkerTemplate

LIMIT_S = 120.0
WORKER = f"""
import json, os, random, signal, sys
from pathlib import Path
from slackwater.worker.process import secret

IMPORTED_IN = os.getpid()

def main():
    print(json.dumps({{
        "argv": sys.argv[1:],
        "command": Path("/proc/self/cmdline").read_text().rstrip(chr(0)).split(chr(0)),
        "key": [secret(), os.environ.get("{SECRET}")],
        "own": sorted(name for name in os.environ if name.startswith("OWN_")),
        "open": [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()],
        "imported_in": IMPORTED_IN,
        "parent": os.getppid(),
        "random": random.random(),
    }}), flush=True)
    while sys.argv[1] == "wait":
        signal.pause()
    sys.exit(int(sys.argv[1]))
"""
AGENT = """
import sys
from pathlib import Path
from tests.unit.worker.test_template import start
from slackwater.worker.template import WorkerTemplate

template = WorkerTemplate()
worker = start(template, Path(sys.argv[1]), "wait", "a")
print(worker.pid, template.process.pid, flush=True)
worker.wait()
"""
MODULES = {
    "probe_engine_worker": WORKER,
    "broken_engine_worker": "import no_such_module\n",
    "threaded_engine_worker": "import threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    + WORKER
    + "\nif __name__ == '__main__':\n"
    "    from slackwater.worker.process import run_worker\n"
    "    run_worker(main)\n",
}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in MODULES.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")


@pytest.fixture
def template() -> Iterator[WorkerTemplate]:
    made = WorkerTemplate()
    yield made
    made.close()


def start(
    template: WorkerTemplate, folder: Path, *arguments: str, module: str = "probe_engine_worker"
) -> subprocess.Popen[bytes]:
    name = arguments[-1]
    own = {SECRET: f"key of {name}", f"OWN_{name}": "", PARENT: str(os.getpid())}
    with (folder / f"{name}.log").open("ab") as log:
        return template.start(
            [sys.executable, "-m", module, *arguments], {**os.environ, **own}, log.fileno()
        )


def said(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.log").read_text())
    return found


def wait_for_text(log: Path) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def pid_of(template: WorkerTemplate) -> int:
    assert template.process is not None
    return template.process.pid


def assert_ended(handle: int) -> None:
    """A pidfd can be read once its process has ended."""
    assert select.select([handle], [], [], LIMIT_S)[0]
    os.close(handle)


def test_a_forked_worker_has_its_own_arguments_environment_log_and_status(
    template: WorkerTemplate, tmp_path: Path
) -> None:
    statuses = {"a": "0", "b": "7"}
    workers = [start(template, tmp_path, status, name) for name, status in statuses.items()]
    assert [worker.wait(LIMIT_S) for worker in workers] == [0, 7]
    for name, status in statuses.items():
        found = said(tmp_path, name)
        assert found["argv"] == [status, name]
        assert found["command"][1:] == ["-m", "probe_engine_worker", status, name]
        assert (found["key"], found["own"]) == ([f"key of {name}", None], [f"OWN_{name}"])
        assert found["open"].count(str(tmp_path / f"{name}.log")) == 2
        assert not [each for each in found["open"] if "socket" in each]
        assert (found["imported_in"], found["parent"]) == (pid_of(template), os.getpid())
    assert said(tmp_path, "a")["random"] != said(tmp_path, "b")["random"]


def test_a_worker_outlives_the_template_and_the_next_one_is_forked_from_another(
    template: WorkerTemplate, tmp_path: Path
) -> None:
    before = set(children(os.getpid()))  # of other tests
    killed = start(template, tmp_path, "wait", "a")
    first = pid_of(template)
    os.kill(first, signal.SIGTERM)  # as a batch scheduler does; the template stays
    told = start(template, tmp_path, "wait", "b")
    killed.kill()
    assert killed.wait(LIMIT_S) == -signal.SIGKILL
    os.kill(first, signal.SIGKILL)
    assert template.process is not None
    template.process.wait(LIMIT_S)
    assert start(template, tmp_path, "5", "c").wait(LIMIT_S) == 5
    assert said(tmp_path, "c")["imported_in"] == pid_of(template) != first
    wait_for_text(tmp_path / "b.log")
    assert (told.poll(), said(tmp_path, "b")["imported_in"]) == (None, first)
    told.send_signal(signal.SIGTERM)
    assert told.wait(LIMIT_S) == 0
    left = set(children(os.getpid())) - before
    assert [pid for pid in left if not is_alive(pid)] == []


def test_nothing_that_a_worker_leaves_behind_becomes_the_agents(
    template: WorkerTemplate, tmp_path: Path
) -> None:
    start(template, tmp_path, "0", "a").wait(LIMIT_S)
    command = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
    left = int(subprocess.check_output(command, timeout=LIMIT_S))
    assert left not in children(os.getpid())
    os.kill(left, signal.SIGKILL)


def test_worker_and_template_end_with_the_agent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", AGENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        handles = [os.pidfd_open(int(pid)) for pid in agent.stdout.readline().split()]
        agent.kill()
    assert len(handles) == 2
    for handle in handles:
        assert_ended(handle)


def test_a_worker_that_cannot_be_imported_says_so_in_its_own_log(
    template: WorkerTemplate, tmp_path: Path
) -> None:
    assert start(template, tmp_path, "0", "a", module="broken_engine_worker").wait(LIMIT_S) == 1
    assert "no_such_module" in (tmp_path / "a.log").read_text()


def test_a_worker_whose_import_starts_threads_is_not_forked(
    template: WorkerTemplate, tmp_path: Path
) -> None:
    worker = start(template, tmp_path, "4", "a", module="threaded_engine_worker")
    assert worker.wait(LIMIT_S) == 4
    assert said(tmp_path, "a")["imported_in"] == worker.pid
    assert template.process is None
