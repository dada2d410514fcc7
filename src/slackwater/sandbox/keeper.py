"""A small process that lives in a control group and starts actions there.

Moving a process into a control group can take the kernel ten milliseconds and more (it waits until every processor
has passed a quiet state); being born in one takes nothing. The children are the supervisor's, not the keeper's.
"""

import os
import pickle
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import Child, ChildEnds, Launch, become, make_pipes

_MOST_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_ANSWER_WITHIN_S = 20.0


class Keeper:
    """The supervisor's end of it."""

    def __init__(self, join_files: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = ours
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _keep(theirs, join_files)
        theirs.close()
        ours.settimeout(_ANSWER_WITHIN_S)
        try:
            if ours.recv(1) != b"+":
                raise UnavailableError("a control group cannot be joined")
        except OSError as error:
            raise UnavailableError(f"a control group cannot be joined: {error}") from None

    def start(self, launch: Launch) -> Child:
        """Have a process started in the control group."""
        own, others = make_pipes()
        try:
            descriptors = [others.stdin, others.stdout, others.stderr, others.said]
            body = pickle.dumps(launch)
            socket.send_fds(self._socket, [_LENGTH.pack(len(body))], descriptors)
            self._socket.sendall(body)
            (pid,) = _PID.unpack(self._receive(_PID.size))
        except OSError as error:
            own.close()
            raise UnavailableError(f"the keeper of a control group has gone: {error}") from None
        finally:
            others.close()
        if pid < 0:
            own.close()
            raise UnavailableError(f"no process can be started: {os.strerror(-pid)}")
        return own.child(pid)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise ConnectionError("it closed its end")
            data += piece
        return data

    def close(self) -> None:
        self._socket.close()
        process_tree.kill(self.pid)
        os.waitpid(self.pid, 0)


def _keep(ends: socket.socket, join_files: Sequence[str]) -> NoReturn:
    """The keeper's life: it ends when the supervisor does."""
    try:
        linux.die_with_parent(signal.SIGKILL)
        for file in join_files:
            Path(file).write_text("0")
        Path("/proc/self/oom_score_adj").write_text("-900")
    except OSError:
        if not _joined(join_files):
            os._exit(1)
    try:
        os.setsid()
        ends.sendall(b"+")
        while True:
            _start_one(ends)
    except BaseException:  # noqa: BLE001  (this process must end here, whatever went wrong)
        os._exit(0)


def _joined(join_files: Sequence[str]) -> bool:
    """Only the wish about memory may have been refused."""
    return all(str(os.getpid()) in Path(file).read_text().split() for file in join_files)


def _start_one(ends: socket.socket) -> None:
    head, descriptors, _, _ = socket.recv_fds(ends, _LENGTH.size, 4)
    if len(head) < _LENGTH.size or len(descriptors) < 4:
        os._exit(0)
    (length,) = _LENGTH.unpack(head)
    body = b""
    while len(body) < length:
        piece = ends.recv(length - len(body))
        if not piece:
            os._exit(0)
        body += piece
    launch: Launch = pickle.loads(body)
    try:
        pid = linux.fork_sibling()
    except OSError as error:
        pid = -(error.errno or 1)
    child_ends = ChildEnds(*descriptors)
    if pid == 0:
        ends.close()
        _be_like_others()
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        become(launch, child_ends)
    child_ends.close()
    ends.sendall(_PID.pack(pid))


def _be_like_others() -> None:
    """The kernel may end it when memory is short."""
    try:
        Path("/proc/self/oom_score_adj").write_text("0")
    except OSError:
        return
