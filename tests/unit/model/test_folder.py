"""A folder that is being made: removed at the end, also if the process that made it was killed."""

import signal
import subprocess
import sys
from pathlib import Path

from slackwater.model.folder import partial_folder


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_makes_stays(
    tmp_path: Path,
) -> None:
    out = tmp_path / "[out]"
    program = (
        "import sys; from pathlib import Path; from slackwater.model.folder import partial_folder\n"
        "with partial_folder(Path(sys.argv[1])) as partial: print(partial, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with partial_folder(out) as ours:
            assert theirs.is_dir() and ours.is_dir() and ours != theirs
        assert theirs.is_dir() and not ours.exists()
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert theirs.is_dir()
    with partial_folder(out) as ours:
        (ours / "weights").touch()
        ours.replace(out)
    assert [path.name for path in tmp_path.iterdir()] == ["[out]"]
