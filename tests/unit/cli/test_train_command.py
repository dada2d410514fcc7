"""`slackwater train`: what it says while it waits, when it is stopped, and at its end."""

import errno
import io
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from slackwater.cli.train import print_resume_command_on_failure, reward_summary, train_command
from slackwater.cli.train_display import display, watch_stalls
from slackwater.model.errors import ConfigError, UnavailableError

AGAIN = "slackwater train copy-digits --run 'my runs/one' --up"


def test_the_command_to_resume_has_the_options_and_no_key() -> None:
    given = {"--set": ["a=1", "b=2"], "--run": Path("my run"), "--url": None, "--up": True}
    said = train_command("copy-digits", given)
    assert said == "slackwater train copy-digits --set a=1 --set b=2 --run 'my run' --up"


SCRIPT = """
import pathlib, signal, sys, time
from slackwater.cli.train import print_resume_command_on_failure
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
folder = pathlib.Path(sys.argv[1])
with print_resume_command_on_failure(folder, sys.argv[2]):
    (folder / "recipe.json").touch()
    (folder / "checkpoint.json").touch()
    print("runs", flush=True)
    while True:  # not signal.pause(), which waits for ever if the signal comes just before it
        time.sleep(0.1)
"""


def test_ctrl_c_says_the_command_that_goes_on(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), AGAIN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert said.splitlines()[0] == f"resume from the last checkpoint with: {AGAIN}"


def test_a_full_disk_is_one_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").touch()
    full = Path("/dev/full")

    def write() -> None:
        with full.open("w") as file:
            file.write("x")

    with (
        pytest.raises(UnavailableError, match="cannot be written: No space left on device"),
        print_resume_command_on_failure(tmp_path, AGAIN),
    ):
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        write()
    said = capsys.readouterr().err
    assert said == f"no checkpoint yet; start again with: {AGAIN}\n"


def test_other_errors_pass_and_a_wrong_setting_is_not_to_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.json").touch()
    with pytest.raises(OSError, match="odd"), print_resume_command_on_failure(tmp_path, AGAIN):
        raise OSError(errno.ENOTTY, "odd")
    with pytest.raises(ConfigError), print_resume_command_on_failure(tmp_path, AGAIN):
        raise ConfigError("--run: is another")
    assert not capsys.readouterr().err


def test_the_summary_never_says_one_figure_twice() -> None:
    assert reward_summary([0.5]) == "0.500 in one step"
    assert reward_summary([0.1, 0.9]) == "0.100 in the first step, 0.900 in the last step"
    assert reward_summary([0.0, 0.1, 0.5, 0.9]) == (
        "0.050 in the first 2 steps, 0.700 in the last 2 steps"
    )


def test_the_display_says_what_the_run_waits_for_until_its_first_step() -> None:
    out = io.StringIO()
    with display(Console(file=out, width=100), 2, 0) as shown:
        shown.stage("a trainer to load tiny")
        shown(0, {"reward": 0.25})
        shown.stage("the samples of step 2")
    said = out.getvalue()
    assert said.splitlines()[0] == "waiting for a trainer to load tiny"
    assert "step 1/2 reward 0.250" in said and "samples of step 2" not in said


def test_a_run_that_stands_still_says_the_services_problem_once() -> None:
    out, over, asked = io.StringIO(), threading.Event(), threading.Semaphore(0)

    def problems() -> list[str]:
        asked.release()
        return ["no engine serves tiny"]

    with display(Console(file=out, width=30), 2, 0) as shown:  # narrower than what is said
        watching = threading.Thread(target=watch_stalls, args=(shown, problems, over, 0.05))
        watching.start()
        for _ in range(3):
            assert asked.acquire(timeout=30)
        over.set()
        watching.join(30)
    assert out.getvalue().count("the run waits: no engine serves tiny") == 1


def test_the_list_of_recipes_describes_each() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "slackwater", "train", "list"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = listed.stdout.splitlines()
    assert len(lines) >= 7
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)
