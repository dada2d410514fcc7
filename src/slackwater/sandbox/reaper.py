"""A process above one action that stays the ancestor of everything the action starts.

Without control groups, an own user or a pid namespace nothing else tells whose a process is: a
daemon leaves its parent and session, but not the nearest subreaper. When the supervisor dies, the
reaper kills everything below it.
"""

import contextlib
import os
import signal
import socket
import struct
import time
from typing import NoReturn

from slackwater.model.errors import RefusedError, UnavailableError
from slackwater.sandbox import linux, process_tree
from slackwater.sandbox.launch import (
    ChildPipes,
    Launch,
    LaunchedProcess,
    ProcessExit,
    become,
    close_all_but,
    heard_from,
    make_pipes,
    received,
    whole,
)

_STARTED = struct.Struct("<i")
_ENDED = struct.Struct("<iddq")
_ANSWER_WITHIN_S = 20.0
_KILL_WITHIN_S = 5.0
_SUPERVISOR_GONE = signal.SIGUSR1


def start_below_reaper(launch: Launch) -> LaunchedProcess:
    """As `launch.start`, with a reaper between; the child's `reaper` is its number."""
    own, others = make_pipes()
    heard, said = os.pipe2(os.O_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    supervisor = os.getpid()
    reaper = os.fork()
    if reaper == 0:
        _live(launch, others, said, theirs, supervisor)
    theirs.close()
    others.close()
    os.close(said)
    ours.settimeout(_ANSWER_WITHIN_S)
    try:
        head, descriptors = received(ours, _STARTED.size)
        if not descriptors:
            raise UnavailableError("a process that was started has gone")
        pid, pidfd = _STARTED.unpack(head)[0], descriptors[0]
        if why := heard_from(heard):
            os.close(pidfd)
            raise RefusedError(why.decode(errors="replace"))
    except (OSError, UnavailableError, RefusedError) as error:
        own.close()
        _end(reaper, ours)
        if isinstance(error, RefusedError):
            raise
        raise UnavailableError(f"no process can be started: {error}") from None
    finally:
        os.close(heard)
    process_tree.helpers.add(reaper)
    child = own.child(pid, lambda _: _reaped(pid, reaper, ours), time.monotonic(), pidfd)
    child.reaper = reaper
    return child


def end_below(reaper: int) -> None:
    """SIGKILL everything below until nothing is left: a process may fork meanwhile."""
    deadline_s = time.monotonic() + _KILL_WITHIN_S
    while time.monotonic() < deadline_s:
        below = [pid for pid in process_tree.below(reaper) if pid != reaper]
        if not any(process_tree.is_alive(pid) for pid in below):
            return
        for pid in below:
            process_tree.kill(pid)
        time.sleep(0.001)


def _reaped(pid: int, reaper: int, ours: socket.socket) -> ProcessExit:
    """How the action ended; then its reaper goes. If that was killed, its children are ours."""
    try:
        return ProcessExit(*_ENDED.unpack(whole(ours, _ENDED.size)))
    except (OSError, UnavailableError):
        return ProcessExit.reaped(pid)
    finally:
        _end(reaper, ours)


def _end(reaper: int, ours: socket.socket) -> None:
    ours.close()
    end_below(reaper)
    process_tree.kill(reaper)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(reaper, 0)
    process_tree.helpers.discard(reaper)


def _live(
    launch: Launch, ends: ChildPipes, said: int, theirs: socket.socket, supervisor: int
) -> NoReturn:
    """The reaper itself, from its fork to its end."""
    try:
        awaited = {signal.SIGCHLD, _SUPERVISOR_GONE}
        signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        linux.adopt_orphans()
        linux.die_with_parent(_SUPERVISOR_GONE)
        if os.getppid() != supervisor:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            become(launch, ends, said)
        socket.send_fds(theirs, [_STARTED.pack(pid)], [os.pidfd_open(pid)])
        close_all_but(theirs.fileno())
        while signal.sigwaitinfo(awaited).si_signo == signal.SIGCHLD:
            _reap_all(pid, theirs)
        end_below(os.getpid())
    finally:
        os._exit(0)


def _reap_all(first: int, theirs: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == first:
                ended = ProcessExit(status, used.ru_utime, used.ru_stime, used.ru_maxrss)
                theirs.sendall(_ENDED.pack(*ended))
