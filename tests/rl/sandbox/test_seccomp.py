"""The filter of system calls, run by a small machine of the three instructions that it uses."""

from __future__ import annotations

import errno
import functools
import struct

import pytest

from burnish.rl.sandbox import linux, seccomp

EPERM = 0x00050000 | errno.EPERM


@functools.cache
def instructions(machine: linux.Machine) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", seccomp.program(machine)))


def decide(machine: linux.Machine, number: int, *arguments: int, arch: int | None = None) -> int:
    """What the filter returns for a system call."""
    data = struct.pack("<iIQ6Q", number, arch or machine.audit_arch, 0, *arguments, *[0] * (6 - len(arguments)))
    program = instructions(machine)
    accumulator = position = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == seccomp.LOAD_WORD:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif code == seccomp.JUMP_IF_EQUAL:
            position += if_true if accumulator == value else if_false
        else:
            assert code == seccomp.RETURN
            return value


@pytest.fixture(params=linux.MACHINES.values(), ids=list(linux.MACHINES))
def machine(request: pytest.FixtureRequest) -> linux.Machine:
    return request.param


def test_only_listed_calls_are_allowed(machine):
    listed = [numbers[machine.column] for numbers in seccomp.ALLOWED.values() if numbers[machine.column] is not None]
    assert len(listed) == len(set(listed))
    allowed = [number for number in range(600) if decide(machine, number, 2**40, 2**40, 2**40) == seccomp.ALLOW]
    assert allowed == sorted(listed)


def test_another_architecture_or_abi_is_refused(machine):
    read = seccomp.ALLOWED["read"][machine.column]
    assert read is not None
    assert decide(machine, read, arch=0x40000003) == seccomp.KILL_PROCESS  # AUDIT_ARCH_I386
    assert decide(machine, read | 0x40000000) == EPERM  # the x32 ABI


@pytest.mark.parametrize(
    ("flags", "action"),
    [
        (0x01200011, seccomp.USER_NOTIF),
        (0x00000011, seccomp.USER_NOTIF),
        (0x01200011 | 1 << 32, EPERM),
        (0x01208011, EPERM),  # CLONE_PARENT
        (0x003D0F00, EPERM),  # a thread
        (0x11200011, EPERM),  # CLONE_NEWUSER
        (0, EPERM),
    ],
)
def test_only_plain_forks_reach_the_server(flags, action, machine):
    assert decide(machine, seccomp.CLONE[machine.column], flags) == action
    assert decide(machine, seccomp.CLONE3[machine.column], flags) == 0x00050000 | errno.ENOSYS


def test_arguments(machine):
    prctl, prlimit, fcntl = (call[machine.column] for call in (seccomp.PRCTL, seccomp.PRLIMIT64, seccomp.FCNTL))
    assert decide(machine, prctl, 1, 9) == seccomp.ALLOW
    assert decide(machine, prctl, 1, 0) == EPERM  # to survive the server
    assert decide(machine, prctl, 36, 1) == EPERM
    assert decide(machine, prlimit, 0, 7, 0, 2**40) == seccomp.ALLOW
    assert decide(machine, prlimit, 0, 7, 2**40, 0) == EPERM
    assert decide(machine, prlimit, 0, 7, 1, 0) == EPERM
    assert [command for command in range(1100) if decide(machine, fcntl, 3, command) == seccomp.ALLOW] == [
        1,
        2,
        3,
        1030,
    ]
