"""A small process that lives in a control group and has the next action's process ready there.

Moving a process into a control group can take the kernel ten milliseconds and more (it waits until every processor
has passed a quiet state); being born in one takes nothing. So a keeper sits in the group and forks, and what it
forks, a spare, waits for its orders. Spares are children of the supervisor, not of the keeper, so the supervisor
learns how they end.

As root a keeper also has a network of its own, which all its actions have after each other: to make and take down
one for every action costs as much again, since the kernel does not make one while it takes one down.
"""

import contextlib
import gc
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from slackwater.model.errors import UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import (
    Child,
    ChildEnds,
    Launch,
    become,
    have_own_network,
    make_pipes,
)

_LENGTH = struct.Struct("<I")
_PID = struct.Struct("<i")
_ANSWER_WITHIN_S = 20.0
_MOST_DESCRIPTORS = 16
_ANY_ORDERS = pickle.dumps(
    Launch(
        argv=["true"],
        variables={"PATH": "/bin"},
        folder=Path("/tmp/any"),
        cores=frozenset({0}),
        rlimits={resource.RLIMIT_CORE: 0},
        enter={linux.CLONE_NEWNS: 0},
    ),
    pickle.HIGHEST_PROTOCOL,
)


@dataclass(slots=True)
class _Spare:
    """A process that waits for its orders on a socket."""

    pid: int
    orders: socket.socket

    def start(self, launch: Launch) -> Child:
        own, others = make_pipes()
        try:
            body = pickle.dumps(launch, pickle.HIGHEST_PROTOCOL)
            ends = [others.stdin, others.stdout, others.stderr, others.said]
            ends += launch.enter.values()
            socket.send_fds(self.orders, [_LENGTH.pack(len(body))], ends)
            self.orders.sendall(body)
        except OSError as error:
            own.close()
            raise UnavailableError(f"a process that was ready has gone: {error}") from None
        finally:
            others.close()
            self.orders.close()
        return own.child(self.pid, launch)


class Keeper:
    """The supervisor's end of it. With `own_network` its spares begin in a network without a way out."""

    def __init__(self, join_files: Sequence[str], *, own_network: bool) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = ours
        self._is_asked = False
        self._ready: _Spare | None = None
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _keep(theirs, join_files, own_network)
        theirs.close()
        ours.settimeout(_ANSWER_WITHIN_S)
        try:
            joined = ours.recv(1) == b"+"
        except OSError:
            joined = False
        if not joined:
            self.close()
            raise UnavailableError("a control group cannot be joined")
        self._ask()

    def own(self) -> set[int]:
        """The keeper, and the spare if there is one; neither is an action's."""
        self._take()
        return {self.pid} | ({self._ready.pid} if self._ready is not None else set())

    def start(self, launch: Launch) -> Child:
        """Have a process started in the control group."""
        self._ask()
        self._take()
        spare, self._ready = self._ready, None
        assert spare is not None
        return spare.start(launch)

    def prepare(self) -> None:
        """Have the next spare made, while nobody waits for it."""
        self._ask()

    def _ask(self) -> None:
        if self._ready is None and not self._is_asked:
            try:
                self._socket.sendall(b"?")
            except OSError as error:
                raise UnavailableError(f"the keeper of a group has gone: {error}") from None
            self._is_asked = True

    def _take(self) -> None:
        """Hear what was asked for."""
        if not self._is_asked:
            return
        self._is_asked = False
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _PID.size, 1)
        except OSError as error:
            raise UnavailableError(f"the keeper of a group has gone: {error}") from None
        if len(head) < _PID.size:
            raise UnavailableError("the keeper of a group has gone")
        (pid,) = _PID.unpack(head)
        if pid < 0:
            raise UnavailableError(f"no process can be started: {os.strerror(-pid)}")
        os.set_inheritable(descriptors[0], False)
        self._ready = _Spare(pid, socket.socket(fileno=descriptors[0]))

    def close(self) -> None:
        with contextlib.suppress(UnavailableError):  # it was killed; so there is no spare
            self._take()
        if self._ready is not None:
            self._ready.orders.close()
            process_tree.kill(self._ready.pid)
            os.waitpid(self._ready.pid, 0)
        self._socket.close()
        process_tree.kill(self.pid)
        os.waitpid(self.pid, 0)


def _keep(ends: socket.socket, join_files: Sequence[str], own_network: bool) -> NoReturn:
    """The keeper's life: it ends when the supervisor does."""
    try:
        linux.die_with_parent(signal.SIGKILL)
        for file in join_files:
            Path(file).write_text("0")
        outside = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC) if own_network else None
        if own_network:
            have_own_network()
        _be_spared("-900")
        os.setsid()
        gc.disable()  # a collection would touch, and so copy, every page
        ends.sendall(b"+")
        while ends.recv(1):
            _fork_spare(ends, outside)
    except BaseException:  # noqa: BLE001  (this process must end here, whatever went wrong)
        os._exit(1)
    os._exit(0)


def _fork_spare(ends: socket.socket, outside: int | None) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        pid = linux.fork_sibling()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid == 0:
        ends.close()
        ours.close()
        _wait_for_orders(theirs, outside)
    socket.send_fds(ends, [_PID.pack(pid)], [ours.fileno()])
    ours.close()
    theirs.close()


def _wait_for_orders(orders: socket.socket, outside: int | None) -> NoReturn:
    """A spare's life until it becomes an action; `outside` is the machine's network, if it is not in that one."""
    try:
        linux.die_with_parent(signal.SIGKILL)
        _be_spared("0")
        if outside is not None:
            linux.unshare(linux.CLONE_NEWIPC)
        # Pages that the orders will touch are copied now, while nobody waits.
        pickle.loads(_ANY_ORDERS)
        head, descriptors, _, _ = socket.recv_fds(orders, _LENGTH.size, _MOST_DESCRIPTORS)
        if len(head) < _LENGTH.size or len(descriptors) < 4:
            os._exit(0)
        body = b""
        (length,) = _LENGTH.unpack(head)
        while len(body) < length:
            piece = orders.recv(length - len(body))
            if not piece:
                os._exit(0)
            body += piece
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        launch: Launch = pickle.loads(body)
        held = dict(zip(launch.enter, descriptors[4:], strict=True))
        become(replace(launch, enter=held), ChildEnds(*descriptors[:4]), outside=outside)
    finally:
        os._exit(1)


def _be_spared(score: str) -> None:
    """Whether the kernel takes this process first or last when memory is short; only root may ask for last."""
    try:
        Path("/proc/self/oom_score_adj").write_text(score)
    except OSError:
        return
