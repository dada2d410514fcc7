"""System calls that actions may not make, as a seccomp program.

Several have been sandbox escapes: user namespaces (which expose root-only kernel code), mounts,
keyrings, `bpf`, `io_uring`. A refused call fails with EPERM. `clone3` has its flags in memory,
which a filter cannot read, so it fails with ENOSYS and C libraries fall back to `clone`.
"""

import errno
import os
import struct
from dataclasses import dataclass

from slackwater.model.errors import RefusedError
from slackwater.sandbox import linux

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ARGUMENTS = 16  # eight bytes each, the low half first

KILL = 0x80000000
ALLOW = 0x7FFF0000
_ERROR = 0x00050000
NOT_PERMITTED = _ERROR | errno.EPERM
NOT_THERE = _ERROR | errno.ENOSYS

_X32 = 0x40000000
_CLONE3 = 435
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # they type into a terminal
_NEW_NAMESPACES = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
# Refused with any argument: the number on x86-64 (or None), and on 64-bit Arm.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "modify_ldt": (154, None),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "uselib": (134, None),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}


@dataclass(frozen=True, slots=True)
class Machine:
    """One architecture: its audit number, table column, and calls with checked arguments."""

    audit_number: int
    column: int
    clone: int
    unshare: int
    setns: int
    ioctl: int


MACHINES = {
    "x86_64": Machine(0xC000003E, 0, clone=56, unshare=272, setns=308, ioctl=16),
    "aarch64": Machine(0xC00000B7, 1, clone=220, unshare=97, setns=268, ioctl=29),
}


def list_refused_calls(machine: Machine) -> dict[str, int]:
    """The calls that are refused with any arguments: numbers by name."""
    found = {name: numbers[machine.column] for name, numbers in _REFUSED.items()}
    return {name: number for name, number in found.items() if number is not None}


def filter_program(machine: str | None = None, *, may_join: bool = False) -> bytes:
    """The seccomp program for a machine (default: this one).

    With `may_join` a launcher can join namespaces for the programs that it starts. They inherit
    this filter, but lack the privileges that the kernel demands for those calls.
    """
    name = machine or os.uname().machine
    if name not in MACHINES:
        known = ", ".join(MACHINES)
        raise RefusedError(f"no system call filter for {name}: sandboxes isolate on {known}")
    this = MACHINES[name]
    code = [
        _load(_ARCHITECTURE),
        _jump(_EQUAL, this.audit_number, 1, 0),
        _return(KILL),
        _load(_NUMBER),
    ]
    if name == "x86_64":
        code += [_jump(_AT_LEAST, _X32, 0, 1), _return(NOT_THERE)]
    code += [_jump(_EQUAL, _CLONE3, 0, 1), _return(NOT_THERE)]
    refused = sorted(list_refused_calls(this).values()) + ([] if may_join else [this.setns])
    for number in refused:
        code += [_jump(_EQUAL, number, 0, 1), _return(NOT_PERMITTED)]
    code += _refuse_bits(this.clone, _NEW_NAMESPACES)
    code += _refuse_bits(this.unshare, linux.CLONE_NEWUSER if may_join else _NEW_NAMESPACES)
    code += [_jump(_EQUAL, this.ioctl, 0, 5), _load(_ARGUMENTS + 8)]
    code += [_jump(_EQUAL, _TIOCSTI, 1, 0), _jump(_EQUAL, _TIOCLINUX, 0, 1)]
    code += [_return(NOT_PERMITTED), _return(ALLOW)]
    return b"".join([*code, _return(ALLOW)])


def _refuse_bits(number: int, bits: int) -> list[bytes]:
    """Refuse a call whose first argument has any of these bits."""
    return [
        _jump(_EQUAL, number, 0, 4),
        _load(_ARGUMENTS),
        _jump(_ANY_BIT, bits, 0, 1),
        _return(NOT_PERMITTED),
        _return(ALLOW),
    ]


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _jump(test: int, value: int, skip_if: int, skip_else: int) -> bytes:
    """A conditional jump over the next instructions."""
    return struct.pack("=HBBI", test, skip_if, skip_else, value)


def _return(action: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, action)
