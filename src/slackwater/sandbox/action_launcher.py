"""A launcher process that lives in a control group and starts actions there.

Moving a process into a control group can take the kernel ten milliseconds (it waits for every
processor to pass a quiet state); a process that is forked inside one is in it at no cost. So a
launcher stays in the group. It takes on an action's namespaces, limits and user, spawns the program
without copying its own memory (`posix_spawn`), and reverts: that takes a fraction of a millisecond,
a fork takes three.

As root a launcher also has a network namespace that its actions use one after the other: creating
and removing one per action costs as much again.

A launcher is the parent of its actions and reports their exits. The supervisor has a pidfd of each,
since a pid may be reused. When the supervisor dies, the launcher kills everything in its group and
exits.
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
from functools import partial
from pathlib import Path

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import (
    FIRST_INPUT,
    HelperProcess,
    Launch,
    LaunchedProcess,
    ProcessExit,
    memory_file,
    open_pipes,
    receive_exactly,
    receive_fds,
    unshare_network,
)
from slackwater.sandbox.system_calls import filter_program

_ORDER = struct.Struct("<ci")
_ANSWER = struct.Struct("<iid")
_START, _PREPARE = b"s", b"p"
# The fields of a launch as they are sent; its descriptors travel as ancillary data: three pipes,
# then the namespaces to join.
_FIELDS = tuple(field.name for field in fields(Launch))
_ANSWER_WITHIN_S = 20.0
_HOME_KINDS = (
    linux.CLONE_NEWPID,
    linux.CLONE_NEWUTS,
    linux.CLONE_NEWCGROUP,
    linux.CLONE_NEWNS,
)
_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGXFSZ, signal.SIGHUP)


class ActionLauncher:
    """The supervisor's end. With `own_network` its actions have an isolated network."""

    def __init__(self, join_files: Sequence[str], *, own_network: bool) -> None:
        self._process = HelperProcess(
            lambda child_end: _LauncherProcess(child_end, join_files, own_network).run(),
            _ANSWER_WITHIN_S,
        )
        self.pid, self._socket = self._process.pid, self._process.socket
        self.close = self._process.close
        try:
            joined = self._socket.recv(1) == b"+"
        except OSError:
            joined = False
        if not joined:
            self.close()
            raise UnavailableError("a control group cannot be joined")

    def start(self, launch: Launch) -> LaunchedProcess:
        """Start a program in the control group; RefusedError has the reason of a failure."""
        if linux.CLONE_NEWUSER in launch.enter:  # a launcher could not leave it again
            raise RefusedError("limits.network: needs root where control groups are used")
        parent_pipes, child_pipes = open_pipes()
        try:
            body = marshal.dumps([getattr(launch, name) for name in _FIELDS])
            pipes = (child_pipes.stdin, child_pipes.stdout, child_pipes.stderr)
            descriptors = [*pipes, *launch.enter.values()]
            order = _ORDER.pack(_START, len(body)) + body
            sent = socket.send_fds(self._socket, [order], descriptors)
            if sent < len(order):
                self._socket.sendall(order[sent:])
            head, pidfds = receive_fds(self._socket, _ANSWER.size)
            head += receive_exactly(self._socket, _ANSWER.size - len(head))
            pid, length, began_s = _ANSWER.unpack(head)
            if pid <= 0:
                raise RefusedError(receive_exactly(self._socket, length).decode(errors="replace"))
        except OSError as error:
            parent_pipes.close()
            raise UnavailableError(f"the launcher of a control group has ended: {error}") from None
        except (UnavailableError, RefusedError):
            parent_pipes.close()
            raise
        finally:
            child_pipes.close()
        return parent_pipes.child(
            pid, partial(ProcessExit.receive, self._socket), began_s, pidfds[0]
        )

    def prepare(self) -> None:
        try:
            self._socket.sendall(_ORDER.pack(_PREPARE, 0))
        except OSError as error:
            raise UnavailableError(f"the launcher of a control group has ended: {error}") from None


class _LauncherProcess:
    """The launcher itself, from its fork to its end."""

    def __init__(
        self, connection: socket.socket, join_files: Sequence[str], own_network: bool
    ) -> None:
        self._connection = connection
        self._join_files = join_files
        self._own_network = own_network
        self._cores = os.sched_getaffinity(0)
        self._home_namespaces: dict[int, int] = {}
        self._joined: set[int] = set()
        self._oom_score = self._proc_folder = self._group_folder = -1
        self._began_s = 0.0
        self._filtered = False
        self._running: tuple[int, int] | None = None  # the action's pid and pidfd

    def run(self) -> None:
        """Until the supervisor's end of the socket is closed."""
        self._set_up()
        self._connection.sendall(b"+")
        while self._handle_next():
            pass
        process_tree.kill_until_gone(lambda: self._group_pids() - {os.getpid()})

    def _set_up(self) -> None:
        for file in self._join_files:
            Path(file).write_text("0")
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._group_folder = os.open(Path(self._join_files[0]).parent, flags | os.O_DIRECTORY)
        self._proc_folder = os.open("/proc", flags | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            self._oom_score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        if self._own_network:
            self._home_namespaces = {kind: linux.open_namespace(kind) for kind in _HOME_KINDS}
            unshare_network()
            network = linux.open_namespace(linux.CLONE_NEWNET)
            # Mounts stay last: see `_join_namespaces`.
            self._home_namespaces = {linux.CLONE_NEWNET: network, **self._home_namespaces}
            linux.unshare(linux.CLONE_NEWIPC)
        if os.getuid() == 0:
            os.setgroups([])
        self._set_oom_score("-900")
        linux.gain_no_privileges()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Or a program that was just started delays the report of its start.
        linux.request_short_slice()
        gc.disable()  # a collection would touch, and so copy, every page
        sys.path.clear()  # hazard: an import would load code from the environment's folder

    def _handle_next(self) -> bool:
        """Handle one order or exit; False when the supervisor is gone."""
        if self._running is not None:
            _, ended = self._running
            orders = self._connection.fileno()
            readable, _, _ = select.select([orders, ended], [], [])
            if ended in readable:
                self._reap()
            if orders not in readable:
                return True
        head, descriptors = receive_fds(self._connection, _ORDER.size)
        if len(head) < _ORDER.size:
            return False
        kind, number = _ORDER.unpack(head)
        if kind == _PREPARE:
            self._return_home()
        else:
            self._handle_start(receive_exactly(self._connection, number), descriptors)
        return True

    def _handle_start(self, body: bytes, descriptors: Sequence[int]) -> None:
        """Start an action and answer with its pidfd, or with the reason of a failure."""
        try:
            arguments = zip(_FIELDS, marshal.loads(body), strict=True)
            pid = self._start(Launch(**dict(arguments)), descriptors)
        except OSError as error:
            reason = str(error).encode()[:4000]
            self._connection.sendall(_ANSWER.pack(0, len(reason), 0.0) + reason)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._running = pid, os.pidfd_open(pid)
        answer = _ANSWER.pack(pid, 0, self._began_s)
        socket.send_fds(self._connection, [answer], [self._running[1]])
        # The control plane and the supervisor, which all actions wait for, come first.
        linux.lower_priority(pid, self._proc_folder)

    def _reap(self) -> None:
        assert self._running is not None
        pid, descriptor = self._running
        self._running = None
        self._connection.sendall(ProcessExit.reap(pid).pack())
        os.close(descriptor)

    def _start(self, order: Launch, descriptors: Sequence[int]) -> int:
        """Take on the action's namespaces, limits and user, spawn it, and revert."""
        if order.filtered and not self._filtered:
            self._install_filter()
        self._join_namespaces(dict(zip(order.enter, descriptors[3:], strict=True)))
        os.chdir(order.folder)
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        for limit, value in order.rlimits.items():
            hard = value if os.getuid() == 0 else resource.getrlimit(limit)[1]
            # Root in a container may not raise a limit again; then this launcher ends and another
            # one replaces it.
            resource.setrlimit(limit, (value, hard))
        if order.own_network and not self._own_network:
            raise OSError("its own network cannot be created here")
        self._set_oom_score("0")
        if order.user is not None:
            os.setresgid(order.user, order.user, 0)
            os.setresuid(order.user, order.user, 0)
        try:
            pid = _spawn(order, descriptors)
            self._began_s = time.monotonic()
            return pid
        finally:
            if order.user is not None:
                os.setresuid(0, 0, 0)
                os.setresgid(0, 0, 0)
            self._set_oom_score("-900")

    def _install_filter(self) -> None:
        """Filter this process permanently: all actions of a supervisor have the same backend."""
        if os.getuid() == 0:
            linux.drop_capabilities()
        linux.filter_calls(filter_program(may_join=self._own_network))
        self._filtered = True

    def _join_namespaces(self, namespaces: Mapping[int, int]) -> None:
        """Join these namespaces and return home from all others; mounts last: they hide files."""
        for kind, home in self._home_namespaces.items():
            if kind in namespaces:
                linux.join_namespace(namespaces[kind], kind)
                self._joined.add(kind)
            elif kind in self._joined:
                linux.join_namespace(home, kind)
                self._joined.discard(kind)

    def _return_home(self) -> None:
        """Leave the last action's namespaces: the last process in one removes it, which is slow."""
        self._join_namespaces({})
        if self._own_network:
            linux.unshare(linux.CLONE_NEWIPC)
        os.sched_setaffinity(0, self._cores)

    def _set_oom_score(self, score: str) -> None:
        """Set the OOM score of this process and what it starts; only root may lower it."""
        with contextlib.suppress(OSError):
            os.pwrite(self._oom_score, score.encode(), 0)

    def _group_pids(self) -> set[int]:
        """Processes in the control group.

        Hazard: an open procs file may repeat stale content, so it is opened anew, and relative to
        the group's folder, since the current mounts may be an environment's.
        """
        file = os.open("cgroup.procs", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._group_folder)
        try:
            return {int(pid) for pid in os.read(file, 1 << 16).split()}
        finally:
            os.close(file)


def _spawn(order: Launch, descriptors: Sequence[int]) -> int:
    """Start the program, searched for along PATH as a shell does."""
    name = order.argv[0]
    folders = [""] if "/" in name else [f"{entry}/" for entry in order.variables["PATH"].split(":")]
    fault: OSError = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    inputs = [memory_file(content) for content in order.inputs]
    targets = [*enumerate(descriptors[:FIRST_INPUT]), *enumerate(inputs, FIRST_INPUT)]
    try:
        for folder in folders:
            try:
                # This runs for every action; a `Path` takes several times as long.
                os.stat(folder + name)
                return os.posix_spawn(
                    folder + name,
                    list(order.argv),
                    order.variables,
                    file_actions=[
                        (os.POSIX_SPAWN_DUP2, source, target) for target, source in targets
                    ],
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
