"""Runs work that holds Python's lock for long, such as parsing a large JSON text, in processes.

A helper is `python -m MODULE`: it reads two parts, each with its length, from standard input,
answers in the same way, and exits at the end of its input, so it never outlives the service. The
second part is raw bytes. Helpers start on demand and have a lower priority than the service.
"""

import contextlib
import queue
import select
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import IO

from slackwater.model.errors import UnavailableError
from slackwater.runtime.priority import give_way

Parts = tuple[bytes, bytes]

_LENGTH = struct.Struct("<Q")
_ANSWER_S = 240.0  # its priority is low, so it is slow on a busy machine, also to start
_NICE = 10


class HelperProcesses:
    """For any thread. Each question has a helper of its own; there are as many as were
    ever needed.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._idle: queue.LifoQueue[subprocess.Popen[bytes]] = queue.LifoQueue()
        self._closed = False

    def ask(self, question: Parts) -> Parts:
        """The helper's answer. If the helper dies, only this question fails."""
        helper = self._helper()
        try:
            assert helper.stdin is not None
            assert helper.stdout is not None
            _write(helper.stdin, question)
            answer = _answer_in_time(helper.stdout)
        except (OSError, EOFError, TimeoutError):
            _end(helper)
            raise UnavailableError("the request could not be read just now; try again") from None
        self._idle.put(helper)
        if self._closed:
            self.close()
        return answer

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
        command = [sys.executable, "-m", self._module]
        helper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        give_way(_NICE, helper.pid)  # here, so that its start delays nobody either
        return helper


def _answer_in_time(stream: IO[bytes]) -> Parts:
    # The stream's buffer is empty: an answer is read whole before the next question is sent.
    if not select.select([stream], [], [], _ANSWER_S)[0]:
        raise TimeoutError
    return _read(stream)


def _end(helper: "subprocess.Popen[bytes]") -> None:
    helper.kill()
    for stream in (helper.stdin, helper.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    helper.wait()


def _write(stream: IO[bytes], parts: Parts) -> None:
    for part in parts:
        stream.write(_LENGTH.pack(len(part)))
        stream.write(part)
    stream.flush()


def _read(stream: IO[bytes]) -> Parts:
    """The next whole message; EOFError at the end."""
    return _read_part(stream), _read_part(stream)


def _read_part(stream: IO[bytes]) -> bytes:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    part = stream.read(length)
    if len(part) < length:
        raise EOFError
    return part


def serve_questions(answer: Callable[[Parts], Parts]) -> None:
    """Answer questions until the input ends: the main loop of a helper."""
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            _write(sys.stdout.buffer, answer(_read(sys.stdin.buffer)))
