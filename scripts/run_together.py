"""Runs test commands beside each other, and shows the output of each when it has ended.

    python scripts/run_together.py 'NAME=COMMAND' ... --low 'NAME=COMMAND' ...

Commands of `--low` use the processor time that the others leave. Each command is in a session of
its own, since Linux may share processors by session. The exit status is 0 if that of every command
is. Ctrl-C interrupts them all, and a second one kills them.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_LOOK_S, _SAY_EVERY_S = 0.2, 30.0
_NICE, _SESSION_NICE = 10, 19  # tests may lower a priority further
_PERCENT = re.compile(r"\[ *(\d+)%\]")  # as pytest writes it at the end of a line
_INTERRUPTED = 130


class Part:
    """One command that runs; its output goes to a file until it has ended."""

    def __init__(self, name: str, command: str, output: Path, *, low: bool) -> None:
        self.name, self._output = name, output
        self._began_s = time.monotonic()
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                # Before the command runs: what it starts inherits the priority.
                preexec_fn=_lower if low else None,
            )

    def signal(self, number: int) -> None:
        """To its processes, as a terminal would."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def progress(self) -> str:
        if self.process.poll() is not None:
            return f"{self.name} ended"
        percents = _PERCENT.findall(self.text())
        return f"{self.name} {percents[-1] if percents else 0} %"

    def show(self) -> None:
        print(f"\n=== {self.name} ===\n{self.text()}", end="", flush=True)
        self.took_s = time.monotonic() - self._began_s

    def summary(self) -> str:
        """Its status, how long it took, and its last line."""
        status = self.process.returncode
        last = self.text().rstrip().rpartition("\n")[2].strip("= ")
        ended = "passed" if status == 0 else f"FAILED with status {status}"
        return f"{self.name}: {ended} after {self.took_s:.0f} s: {last}"


def _lower() -> None:
    """Lower the priority of this process and of its session."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_SESSION_NICE))


@contextlib.contextmanager
def _collecting_signals() -> Iterator[list[int]]:
    """The signals that ask this process to end, as they come."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda *got: received.append(got[0])) for number in numbers
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(commands: Sequence[tuple[str, str, bool]]) -> int:
    """Run commands of these names, at a low priority or not; returns the exit status."""
    parts: list[Part] = []
    began_s = said_s = time.monotonic()
    with tempfile.TemporaryDirectory() as outputs, _collecting_signals() as received:
        for number, (name, command, low) in enumerate(commands):
            parts.append(Part(name, command, Path(outputs) / str(number), low=low))
        running, forwarded = list(parts), 0
        while running:
            time.sleep(_LOOK_S)
            while forwarded < len(received):
                for part in running:
                    part.signal(signal.SIGKILL if forwarded else signal.SIGINT)
                forwarded += 1
            for part in [each for each in running if each.process.poll() is not None]:
                running.remove(part)
                part.show()
            if running and time.monotonic() - said_s >= _SAY_EVERY_S:
                said_s = time.monotonic()
                shown = ", ".join(part.progress() for part in parts)
                print(f"{said_s - began_s:.0f} s: {shown}", flush=True)
        print()
        for part in parts:
            print(part.summary())
    print(f"together: {time.monotonic() - began_s:.0f} s", flush=True)
    if received:
        return _INTERRUPTED
    return int(any(part.process.returncode for part in parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commands", nargs="*", metavar="NAME=COMMAND")
    parser.add_argument("--low", nargs="*", default=[], metavar="NAME=COMMAND")
    options = parser.parse_args()
    named = [(each, False) for each in options.commands] + [(each, True) for each in options.low]
    sys.exit(run([(*each.split("=", 1), low) for each, low in named]))


if __name__ == "__main__":
    main()
