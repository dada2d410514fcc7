"""The filter of system calls: its verdicts on each architecture, and what an action is told."""

import errno
import json
import os
import struct

import pytest
from sandbox_stage import Stage, a_stage, as_non_root, bubblewrap_missing

from slackwater.model.errors import RefusedError
from slackwater.sandbox import linux
from slackwater.sandbox.system_calls import (
    ALLOW,
    KILL,
    MACHINES,
    NOT_PERMITTED,
    NOT_THERE,
    filter_program,
    list_refused_calls,
)


def judged(program: bytes, mark: int, number: int, *arguments: int) -> int:
    """What the kernel would do: run the program over a call."""
    told = struct.pack("=IIQ6Q", number, mark, 0, *arguments, *[0] * (6 - len(arguments)))
    at, held = 0, 0
    for _ in range(len(program)):
        code, over_if, over_else, value = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        if code == 0x06:
            return int(value)
        if code == 0x20:
            held = struct.unpack_from("=I", told, value)[0]
            continue
        is_so = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
        at += over_if if is_so else over_else
    raise AssertionError("the program does not end")


@pytest.mark.parametrize("may_join", [False, True])
@pytest.mark.parametrize("name", MACHINES)
def test_what_the_filter_says(name: str, may_join: bool) -> None:
    machine, program = MACHINES[name], filter_program(name, may_join=may_join)
    for call, number in list_refused_calls(machine).items():
        assert judged(program, machine.audit_number, number) == NOT_PERMITTED, call
    assert judged(program, machine.audit_number, 435) == NOT_THERE
    for namespaces in (linux.CLONE_NEWUSER, linux.CLONE_NEWUSER | linux.CLONE_NEWNET):
        for number in (machine.clone, machine.unshare):
            assert judged(program, machine.audit_number, number, namespaces) == NOT_PERMITTED
    thread = 0x3D0F00  # as C libraries make one
    assert judged(program, machine.audit_number, machine.clone, thread) == ALLOW
    assert judged(program, machine.audit_number, machine.clone, 17) == ALLOW
    assert judged(program, machine.audit_number, machine.unshare, 0x400) == ALLOW
    assert judged(program, machine.audit_number, machine.ioctl, 0, 0x5412) == NOT_PERMITTED
    assert judged(program, machine.audit_number, machine.ioctl, 0, 0x541C) == NOT_PERMITTED
    assert judged(program, machine.audit_number, machine.ioctl, 0, 0x5413) == ALLOW
    entered = ALLOW if may_join else NOT_PERMITTED
    assert judged(program, machine.audit_number, machine.setns, 3, 0) == entered
    assert judged(program, machine.audit_number, machine.unshare, linux.CLONE_NEWIPC) == entered
    for number in (0, 1, 2, 3, 59, 63, 221):
        assert judged(program, machine.audit_number, number) == ALLOW


def test_calls_of_other_machines_are_no_way_round() -> None:
    x86, arm = MACHINES["x86_64"], MACHINES["aarch64"]
    i386 = 0x40000003
    assert judged(filter_program("x86_64"), i386, 20) == KILL
    assert judged(filter_program("x86_64"), arm.audit_number, 0) == KILL
    assert judged(filter_program("aarch64"), x86.audit_number, 0) == KILL
    assert judged(filter_program("x86_64"), x86.audit_number, 0x40000000 | 39) == NOT_THERE


def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(RefusedError, match="no system call filter for vax"):
        filter_program("vax")


# Makes every refused call, also those that are refused by their arguments; the kernel's answers.
PROBE = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
said = {}
for name, words in json.loads(sys.argv[1]).items():
    ctypes.set_errno(0)
    result = libc.syscall(*[ctypes.c_long(word) for word in words])
    said[name] = ctypes.get_errno() if result == -1 else 0
print(json.dumps(said))
"""


def told_inside(stage: Stage) -> dict[str, int]:
    machine = MACHINES[os.uname().machine]
    calls = {name: [number] + [0] * 6 for name, number in list_refused_calls(machine).items()}
    calls |= {"clone3": [435, 0, 0]}
    calls |= {"unshare user": [machine.unshare, linux.CLONE_NEWUSER]}
    calls |= {"unshare mounts": [machine.unshare, linux.CLONE_NEWNS]}
    calls |= {"setns": [machine.setns, 0, 0]}
    calls |= {"clone user": [machine.clone, linux.CLONE_NEWUSER | 17, 0, 0, 0, 0]}
    ran = stage.run("python3", "-c", PROBE, json.dumps(calls))
    assert ran.over.status == 0, ran
    return {str(name): int(number) for name, number in json.loads(ran.stdout).items()}


def unexpected(told: dict[str, int]) -> dict[str, int]:
    wanted = dict.fromkeys(told, errno.EPERM) | {"clone3": errno.ENOSYS}
    wanted["setns"] = told["setns"] if told["setns"] == errno.EINVAL else errno.EPERM
    return {name: number for name, number in told.items() if number != wanted[name]}


def status_inside(stage: Stage) -> dict[str, str]:
    told = stage.sh("cat /proc/self/status").stdout
    return {name: value.strip() for name, _, value in (x.partition(":") for x in told.splitlines())}


def test_an_action_is_refused_what_it_needs_no_privilege_for(stage: Stage) -> None:
    if not (stage.platform.backend.isolates or stage.platform.users is not None):
        pytest.skip("a plain process without root is not filtered")
    assert unexpected(told_inside(stage)) == {}
    status = status_inside(stage)
    assert (status["Seccomp"], status["NoNewPrivs"]) == ("2", "1")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[name], 16) == 0, name


def _probed() -> str:
    with a_stage("bubblewrap") as stage:
        stage.supervisor.open("e")
        told, status = told_inside(stage), status_inside(stage)
        bounds = stage.sh("unshare -U true; echo $?").stdout.strip()
        return f"{unexpected(told)} {status['Seccomp']} {int(status['CapBnd'], 16)} {bounds}"


def test_without_root_it_is_refused_the_same() -> None:
    if (why := bubblewrap_missing()) is not None:
        pytest.skip(f"this machine has no working bubblewrap: {why}")
    assert as_non_root(_probed) == "{} 2 0 1"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of 32-bit x86")
def test_calls_of_32_bit_programs_end_the_action(stage: Stage) -> None:
    if not (stage.platform.backend.isolates or stage.platform.users is not None):
        pytest.skip("a plain process without root is not filtered")
    call = (
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"  # getpid by `int 0x80`
        "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print(ctypes.CFUNCTYPE(ctypes.c_int)(at)())\n"
    )
    ran = stage.run("python3", "-c", call)
    assert ran.stdout == ""
    assert ran.over.status != 0
