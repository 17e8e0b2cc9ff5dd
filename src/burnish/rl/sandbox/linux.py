"""System calls that Python's standard library does not wrap, and their numbers.

Numbers differ between machines: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (which
aarch64 uses) of the Linux sources.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import NamedTuple


class Machine(NamedTuple):
    """A kind of processor: ``Machine(audit_arch=0xC000003E, column=0)``.

    Attributes:
        audit_arch: AUDIT_ARCH_X86_64 or AUDIT_ARCH_AARCH64 of include/uapi/linux/audit.h, which seccomp filters check.
        column: the column of tables of system calls.
    """

    audit_arch: int
    column: int


MACHINES = {"x86_64": Machine(0xC000003E, 0), "aarch64": Machine(0xC00000B7, 1)}

SECCOMP = (317, 277)
CAPSET = (126, 91)
LANDLOCK_CREATE_RULESET = (444, 444)
LANDLOCK_ADD_RULE = (445, 445)
LANDLOCK_RESTRICT_SELF = (446, 446)

# include/uapi/linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38


def machine() -> Machine | None:
    """The kind of this machine, or None if the sandbox knows no numbers of system calls for it."""
    return MACHINES.get(platform.machine()) if sys.platform == "linux" else None


def syscall(numbers: tuple[int, int], *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call, whose number is given for each column of ``MACHINES``.

    Raises:
        OSError: if it fails, or if this machine is not known (ENOSYS, as if its kernel had no such call).
    """
    known = machine()
    if known is None:
        raise OSError(38, "Function not implemented")
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(numbers[known.column]), *values))


def prctl(option: int, value: int) -> None:
    """Set an option of this process.

    Raises:
        OSError: if it fails.
    """
    _checked(_LIBC.prctl(option, *(ctypes.c_ulong(number) for number in (value, 0, 0, 0))))


def _checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def drop_capabilities() -> None:
    """Give up all capabilities of this process, which has some only if it runs as root.

    Raises:
        OSError: if it fails.
    """
    # struct __user_cap_header_struct {version, pid} with _LINUX_CAPABILITY_VERSION_3, and two structs
    # __user_cap_data_struct {effective, permitted, inheritable}: include/uapi/linux/capability.h
    header = ctypes.create_string_buffer((0x20080522).to_bytes(4, sys.byteorder) + bytes(4), 8)
    syscall(CAPSET, header, ctypes.create_string_buffer(24))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
