"""The process that makes environments' mounts: what is asked of it is there, also when somebody has
killed it.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_stage import a_stage

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import can_create_namespaces
from slackwater.sandbox.mounts import MountMaker, Mounts

pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not can_create_namespaces(), reason="only root can make mounts"
)


@pytest.fixture
def maker() -> Iterator[MountMaker]:
    made = MountMaker()
    yield made
    made.close()


def mounts_in(folder: Path, said: str) -> Mounts:
    """An environment whose temporary folder has a file that says something."""
    (folder / "view").mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp" / "said").write_text(said)
    return Mounts(str(folder / "view"), str(folder / "tmp"))


def read_inside(descriptor: int, path: str) -> bytes:
    """What a process reads that has entered the mounts."""
    heard, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            linux.join_namespace(descriptor, linux.CLONE_NEWNS)
            os.write(told, Path(path).read_bytes())
        finally:
            os._exit(0)
    os.close(told)
    found = os.read(heard, 100)
    os.close(heard)
    os.waitpid(pid, 0)
    return found


def own_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_each_environment_sees_its_own_temporary_folder_in_whatever_order_they_are_taken(
    maker: MountMaker, tmp_path: Path
) -> None:
    asked = {
        said: maker.request(mounts_in(tmp_path / said, said)) for said in ("one", "two", "three")
    }
    for said in ("three", "one", "two"):
        descriptor = maker.wait_for(asked[said])
        assert read_inside(descriptor, "/dev/shm/said") == said.encode()
        os.close(descriptor)
        maker.release(asked[said])


def test_what_cannot_be_made_says_why_and_the_next_is_made(
    maker: MountMaker, tmp_path: Path
) -> None:
    bad = maker.request(Mounts(str(tmp_path / "nowhere"), str(tmp_path / "nowhere")))
    good = maker.request(mounts_in(tmp_path / "good", "good"))
    with pytest.raises(UnavailableError, match="nowhere"):
        maker.wait_for(bad)
    descriptor = maker.wait_for(good)
    assert read_inside(descriptor, "/dev/shm/said") == b"good"
    os.close(descriptor)


def test_what_is_forgotten_before_it_was_taken_leaves_no_descriptor(
    maker: MountMaker, tmp_path: Path
) -> None:
    first = maker.request(mounts_in(tmp_path / "first", "first"))
    os.close(maker.wait_for(first))
    maker.release(first)
    before = own_descriptors()
    for number in range(50):
        maker.release(maker.request(mounts_in(tmp_path / str(number), "forgotten")))
    last = maker.request(mounts_in(tmp_path / "last", "last"))
    os.close(maker.wait_for(last))  # everything before it has been heard of
    assert own_descriptors() == before


def test_an_action_runs_though_the_maker_was_killed_before_and_after_its_environment_opened() -> (
    None
):
    with a_stage("process") as stage:
        stage.supervisor.open("e")
        assert stage.sh("true").over.status == 0
        for name in ("before", "after"):
            if name == "before":
                kill_helpers()
            stage.supervisor.open(name)
            if name == "after":
                kill_helpers()
            ran = stage.sh("echo x > /tmp/x && cat /tmp/x", environment=name)
            assert (ran.over.status, ran.stdout) == (0, "x\n")
    assert not process_tree.helpers


def kill_helpers() -> None:
    """Those that make mounts, and those that work on files."""
    for helper in process_tree.helpers:
        os.kill(helper, signal.SIGKILL)
        os.waitid(os.P_PID, helper, os.WEXITED | os.WNOWAIT)
