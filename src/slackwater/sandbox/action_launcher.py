"""A launcher process that lives in a control group and starts actions there.

Moving a process into a control group can take the kernel ten milliseconds (it waits for every
processor to pass a quiet state); being born in one takes nothing. So a launcher sits in the group.
It takes on an action's namespaces, limits and user, spawns the program without copying its own
memory (`posix_spawn`), and reverts: a fraction of a millisecond instead of three for a fork.

As root a launcher also has a network namespace that its actions use one after the other: making and
removing one per action costs as much again.

It is the parent of what it starts and reports exits; the supervisor holds a pidfd, since a pid may
be reused. When the supervisor dies, it kills everything in its group and exits.
"""

import contextlib
import errno
import gc
import marshal
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import (
    FIRST_INPUT,
    Launch,
    LaunchedProcess,
    ProcessExit,
    fork_helper,
    have_own_network,
    make_pipes,
    readable,
    received,
    whole,
)
from slackwater.sandbox.system_calls import filter_program

_ORDER = struct.Struct("<ci")
_ANSWER = struct.Struct("<iid")
_ENDED = struct.Struct("<iddq")
_START, _PREPARE = b"s", b"p"
# Of a launch on the wire; its descriptors travel beside it: three pipes, then namespaces to enter.
_FIELDS = tuple(field.name for field in fields(Launch))
_ANSWER_WITHIN_S = 20.0
_HOMES = (
    linux.CLONE_NEWPID,
    linux.CLONE_NEWUTS,
    linux.CLONE_NEWCGROUP,
    linux.CLONE_NEWNS,
)
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ, signal.SIGHUP)


class ActionLauncher:
    """The supervisor's end. With `own_network` its actions have a network with no way out."""

    def __init__(self, join_files: Sequence[str], *, own_network: bool) -> None:
        self.pid, self._socket = fork_helper(
            lambda theirs: _Life(theirs, join_files, own_network).live(), _ANSWER_WITHIN_S
        )
        try:
            joined = self._socket.recv(1) == b"+"
        except OSError:
            joined = False
        if not joined:
            self.close()
            raise UnavailableError("a control group cannot be joined")

    def start(self, launch: Launch) -> LaunchedProcess:
        """Have a program started in the control group; RefusedError says why it cannot be."""
        if linux.CLONE_NEWUSER in launch.enter:  # from which a keeper would not come back
            raise RefusedError("limits.network: needs root where control groups are used")
        own, others = make_pipes()
        try:
            body = marshal.dumps([getattr(launch, name) for name in _FIELDS])
            ends = [others.stdin, others.stdout, others.stderr, *launch.enter.values()]
            order = _ORDER.pack(_START, len(body)) + body
            sent = socket.send_fds(self._socket, [order], ends)
            if sent < len(order):
                self._socket.sendall(order[sent:])
            head, pidfds = received(self._socket, _ANSWER.size)
            head += whole(self._socket, _ANSWER.size - len(head))
            pid, length, began_s = _ANSWER.unpack(head)
            if pid <= 0:
                raise RefusedError(whole(self._socket, length).decode(errors="replace"))
        except OSError as error:
            own.close()
            raise UnavailableError(f"the keeper of a group has gone: {error}") from None
        except (UnavailableError, RefusedError):
            own.close()
            raise
        finally:
            others.close()
        return own.child(pid, self._reaped, began_s, pidfds[0])

    def _reaped(self, pid: int) -> ProcessExit:
        """How it ended. If the launcher has died, its children are the supervisor's."""
        try:
            return ProcessExit(*_ENDED.unpack(whole(self._socket, _ENDED.size)))
        except (OSError, UnavailableError):
            return ProcessExit.reaped(pid)

    def prepare(self) -> None:
        """Prepare what the next action needs, between actions."""
        try:
            self._socket.sendall(_ORDER.pack(_PREPARE, 0))
        except OSError as error:
            raise UnavailableError(f"the keeper of a group has gone: {error}") from None

    def close(self) -> None:
        self._socket.close()
        process_tree.end(self.pid)


class _Life:
    """The keeper itself, from its fork to its end."""

    def __init__(self, ends: socket.socket, join_files: Sequence[str], own_network: bool) -> None:
        self._ends = ends
        self._join_files = join_files
        self._own_network = own_network
        self._cores = os.sched_getaffinity(0)
        self._homes: dict[int, int] = {}
        self._away: set[int] = set()
        self._oom_score = self._processes = self._group = -1
        self._began_s = 0.0
        self._filtered = False
        self._running: tuple[int, int] | None = None  # the action: its number and its descriptor

    def live(self) -> None:
        """Until the supervisor's end of the socket is closed."""
        self._settle()
        self._ends.sendall(b"+")
        while self._serve():
            pass
        process_tree.end_all(lambda: self._inside() - {os.getpid()})

    def _settle(self) -> None:
        for file in self._join_files:
            Path(file).write_text("0")
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._group = os.open(Path(self._join_files[0]).parent, flags | os.O_DIRECTORY)
        self._processes = os.open("/proc", flags | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            self._oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        if self._own_network:
            self._homes = {kind: linux.open_namespace(kind) for kind in _HOMES}
            have_own_network()
            network = linux.open_namespace(linux.CLONE_NEWNET)
            self._homes = {linux.CLONE_NEWNET: network, **self._homes}  # the mounts stay the last
            linux.unshare(linux.CLONE_NEWIPC)
        if os.getuid() == 0:
            os.setgroups([])
        self._be_spared("-900")
        linux.gain_no_privileges()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        linux.be_quick()  # or a program that it has just started keeps it from saying so
        gc.disable()  # a collection would touch, and so copy, every page
        sys.path.clear()  # in an environment's folder and mounts, nothing may be imported

    def _serve(self) -> bool:
        """Handle one order or exit; False when the supervisor is gone."""
        if self._running is not None:
            _, ended = self._running
            orders = self._ends.fileno()
            readable, _, _ = select.select([orders, ended], [], [])
            if ended in readable:
                self._reap()
            if orders not in readable:
                return True
        head, descriptors = received(self._ends, _ORDER.size)
        if len(head) < _ORDER.size:
            return False
        kind, number = _ORDER.unpack(head)
        if kind == _PREPARE:
            self._prepare()
        else:
            self._begin(whole(self._ends, number), descriptors)
        return True

    def _begin(self, body: bytes, descriptors: Sequence[int]) -> None:
        """Start what is ordered and answer with its descriptor, or with the reason of failure."""
        try:
            given = zip(_FIELDS, marshal.loads(body), strict=True)
            pid = self._start(Launch(**dict(given)), descriptors)
        except OSError as error:
            said = str(error).encode()[:4000]
            self._ends.sendall(_ANSWER.pack(0, len(said), 0.0) + said)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._running = pid, os.pidfd_open(pid)
        answer = _ANSWER.pack(pid, 0, self._began_s)
        socket.send_fds(self._ends, [answer], [self._running[1]])
        # The plane and the supervisor, which all actions wait for, come first.
        linux.give_way(pid, self._processes)

    def _reap(self) -> None:
        assert self._running is not None
        pid, descriptor = self._running
        self._running = None
        self._ends.sendall(_ENDED.pack(*ProcessExit.reaped(pid)))
        os.close(descriptor)

    def _start(self, order: Launch, descriptors: Sequence[int]) -> int:
        """Become what the action shall be, have it started, and become oneself again."""
        if order.filtered and not self._filtered:
            self._filter()
        self._enter(dict(zip(order.enter, descriptors[3:], strict=True)))
        os.chdir(order.folder)
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        for limit, most in order.rlimits.items():
            hard = most if os.getuid() == 0 else resource.getrlimit(limit)[1]
            # Root in a container may not raise a limit again; then this keeper goes, and a new one
            # comes.
            resource.setrlimit(limit, (most, hard))
        if order.own_network and not self._own_network:
            raise OSError("a network of its own cannot be made here")
        self._be_spared("0")
        if order.user is not None:
            os.setresgid(order.user, order.user, 0)
            os.setresuid(order.user, order.user, 0)
        try:
            pid = _spawned(order, descriptors)
            self._began_s = time.monotonic()
            return pid
        finally:
            if order.user is not None:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            self._be_spared("-900")

    def _filter(self) -> None:
        """Filter this process for good: all actions of a supervisor have the same backend."""
        if os.getuid() == 0:
            linux.drop_capabilities()
        linux.filter_calls(filter_program(enters=self._own_network))
        self._filtered = True

    def _enter(self, held: Mapping[int, int]) -> None:
        """Enter these namespaces and otherwise return home; mounts last, they hide our files."""
        for kind, home in self._homes.items():
            if kind in held:
                linux.enter(held[kind], kind)
                self._away.add(kind)
            elif kind in self._away:
                linux.enter(home, kind)
                self._away.discard(kind)

    def _prepare(self) -> None:
        """Home first: the last process in a namespace removes it, which takes time."""
        self._enter({})
        if self._own_network:
            linux.unshare(linux.CLONE_NEWIPC)
        os.sched_setaffinity(0, self._cores)

    def _be_spared(self, score: str) -> None:
        """Set the OOM score of this process and what it starts; only root may lower it."""
        with contextlib.suppress(OSError):
            os.pwrite(self._oom_score, score.encode(), 0)

    def _inside(self) -> set[int]:
        """Hazard: an open procs file may repeat stale content, so open it anew, relative to the
        group's folder, since the mounts may be an environment's.
        """
        file = os.open("cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._group)
        try:
            return {int(pid) for pid in os.read(file, 1 << 16).split()}
        finally:
            os.close(file)


def _spawned(order: Launch, ends: Sequence[int]) -> int:
    """The program, looked for as a shell does."""
    name = order.argv[0]
    places = [""] if "/" in name else [f"{at}/" for at in order.variables["PATH"].split(":")]
    fault: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    inputs = [readable(content) for content in order.inputs]
    given = [*enumerate(ends[:FIRST_INPUT]), *enumerate(inputs, FIRST_INPUT)]
    try:
        for place in places:
            try:
                # For every action; a `Path` takes several times as long.
                os.stat(place + name)
                return os.posix_spawn(
                    place + name,
                    list(order.argv),
                    order.variables,
                    file_actions=[(os.POSIX_SPAWN_DUP2, own, target) for target, own in given],
                    setsid=True,
                    setsigmask=(),
                    setsigdef=_DEFAULT_SIGNALS,
                )
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError as error:
                fault = error
        raise fault
    finally:
        for descriptor in inputs:
            os.close(descriptor)
