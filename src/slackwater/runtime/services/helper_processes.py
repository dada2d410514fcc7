"""Runs work that holds Python's lock for long, such as parsing a large JSON text, in processes.

A helper reads pickled calls from standard input, writes pickled results to standard output, and
exits at the end of its input, so it never outlives the service. Helpers start on demand and have a
lower priority than the service.
"""

import contextlib
import pickle
import queue
import select
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from slackwater.model.errors import SlackwaterError, UnavailableError
from slackwater.runtime.priority import give_way

T = TypeVar("T")
_COMMAND = [sys.executable, "-m", "slackwater.runtime.services.helper_processes"]
_ANSWER_S = 240.0  # its priority is low, so it is slow on a busy machine, also to start
_NICE = 10


class HelperProcesses:
    """For any thread. Each call has a helper of its own; there are as many as were ever needed."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[subprocess.Popen[bytes]] = queue.LifoQueue()
        self._closed = False

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a module's function returns; a SlackwaterError that it raises is raised here. If the
        helper dies, only this call fails.
        """
        helper = self._helper()
        try:
            assert helper.stdin is not None
            assert helper.stdout is not None
            pickle.dump((function, arguments), helper.stdin)
            helper.stdin.flush()
            # The stream's buffer is empty: a result is read whole before the next call is sent.
            if not select.select([helper.stdout], [], [], _ANSWER_S)[0]:
                raise TimeoutError
            result: T | SlackwaterError = pickle.load(helper.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            _end(helper)
            raise UnavailableError("the request could not be read just now; try again") from None
        self._idle.put(helper)
        if self._closed:
            self.close()
        if isinstance(result, SlackwaterError):
            raise result
        return result

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                _end(self._idle.get_nowait())

    def _helper(self) -> "subprocess.Popen[bytes]":
        with contextlib.suppress(queue.Empty):
            while True:
                helper = self._idle.get_nowait()
                if helper.poll() is None:
                    return helper
                _end(helper)
        helper = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        give_way(_NICE, helper.pid)  # here, so that its start delays nobody either
        return helper


def _end(helper: "subprocess.Popen[bytes]") -> None:
    helper.kill()
    for stream in (helper.stdin, helper.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    helper.wait()


def _serve_calls() -> None:
    """Execute calls until the input ends."""
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            function, arguments = pickle.load(sys.stdin.buffer)
            try:
                result = function(*arguments)
            except SlackwaterError as error:
                result = error
            pickle.dump(result, sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve_calls()
