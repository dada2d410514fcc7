"""System calls that Python does not wrap."""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_NAMESPACES = {
    CLONE_NEWNS: "mnt",
    CLONE_NEWCGROUP: "cgroup",
    CLONE_NEWUTS: "uts",
    CLONE_NEWUSER: "user",
    CLONE_NEWPID: "pid",
    CLONE_NEWNET: "net",
}

MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_MAX_CAPABILITIES = 64
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_FICLONE = 0x40049409

CLONE_PARENT = 0x00008000
_SYS_CLONE3 = 435  # the same number on every architecture

_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
_SCHED_OTHER, _SCHED_BATCH = 0, 3
_SCHED_RESET_ON_FORK = 1
_SHORT_SLICE_NS, _LONG_SLICE_NS = 100_000, 20_000_000
_NICENESS = 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None, use_errno=True)


def _raise_on_error(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _raise_on_error(_libc.unshare(flags), "unshare")


def join_namespace(descriptor: int, kind: int) -> None:
    """Join the namespace of a /proc/*/ns/* descriptor."""
    _raise_on_error(_libc.setns(descriptor, kind), "setns")


def open_namespace(kind: int, process: int | str = "self") -> int:
    """A descriptor of a process's namespace; this process's own by default."""
    return os.open(f"/proc/{process}/ns/{_NAMESPACES[kind]}", os.O_RDONLY)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    _raise_on_error(
        _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()),
        f"mount {target}",
    )


def unmount(target: str) -> None:
    """Detach a mount at once; processes that have it open keep it until they end."""
    _raise_on_error(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def die_with_parent(number: int) -> None:
    """Send this process a signal when the thread that started it ends; a user change resets it."""
    _raise_on_error(_libc.prctl(_PR_SET_PDEATHSIG, number), "prctl")


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become a subreaper, which adopts orphaned descendants, or cease to be one."""
    _raise_on_error(_libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt)), "prctl")


def gain_no_privileges() -> None:
    """From now on no program gains privileges by being executed (no setuid, no capabilities)."""
    _raise_on_error(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Programs executed from now on have no capabilities; this process keeps its own."""
    for capability in range(_MAX_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # the kernel has no more
                return
            _raise_on_error(-1, "prctl")


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter for this thread and its children."""
    filter_program = _FilterProgram(len(program) // 8, program)
    mode = _SECCOMP_MODE_FILTER
    _raise_on_error(_libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(filter_program), 0, 0), "prctl")


def bring_loopback_up() -> None:
    """Enable the loopback interface of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", _IFF_UP, b""))


def clone_file(source: int, target: int) -> None:
    """Share a file's blocks copy-on-write, where the file system supports it."""
    fcntl.ioctl(target, _FICLONE, source)


def lower_priority(pid: int, processes: int) -> None:
    """Lower the priority of a process, its children and its autogroup session.

    Process 0 is this one. `processes` is an open descriptor of the machine's `/proc`: inside an
    environment the path may lead to another one, or to none.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
        _schedule(pid, _SCHED_BATCH, _NICENESS, _LONG_SLICE_NS)
        descriptor = os.open(f"{pid or 'self'}/autogroup", os.O_WRONLY, dir_fd=processes)
        try:
            os.write(descriptor, str(_NICENESS).encode())
        finally:
            os.close(descriptor)


def request_short_slice() -> None:
    """Run at once on wake-up, in slices of 0.1 ms, before new work; children are unaffected."""
    with contextlib.suppress(OSError):
        _schedule(0, _SCHED_OTHER, 0, _SHORT_SLICE_NS, _SCHED_RESET_ON_FORK)


def _schedule(pid: int, policy: int, niceness: int, slice_ns: int, flags: int = 0) -> None:
    """Set policy and slice; kernels before 6.12 ignore the slice."""
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None:
        return
    attributes = struct.pack("=IIQiIQQQ", 48, policy, flags, niceness, 0, slice_ns, 0, 0)
    _raise_on_error(_libc.syscall(number, pid, attributes, 0), "sched_setattr")


def fork_sibling() -> int:
    """Fork a sibling: its parent is our parent. Hazard: requires a single thread."""
    arguments = (ctypes.c_uint64 * 8)(CLONE_PARENT)
    pid: int = _libc_with_lock.syscall(
        _SYS_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments)
    )
    if pid < 0:
        _raise_on_error(pid, "clone3")
    return pid
