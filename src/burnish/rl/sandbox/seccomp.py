"""Seccomp: a filter that allows only the system calls that computing in Python needs.

Described in Documentation/userspace-api/seccomp_filter.rst of the Linux sources. A filter is a program of the classic
BPF machine (Documentation/networking/filter.rst) that the kernel runs for every system call. It sees the number of the
call and its arguments, but no memory. Refused calls fail with EPERM, which Python raises as PermissionError.

A fork must be possible, because a session goes on in a fork of its last process, and impossible, because a snippet must
not start processes. Therefore, the filter lets the server decide about each fork (SECCOMP_RET_USER_NOTIF).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import signal
import struct

from burnish.rl.sandbox import linux

# Numbers on x86_64 and aarch64, which has no such call where it says None.
ALLOWED: dict[str, tuple[int, int | None]] = {
    # files: which can be opened is up to Landlock
    "read": (0, 63),
    "readv": (19, 65),
    "pread64": (17, 67),
    "write": (1, 64),
    "writev": (20, 66),
    "close": (3, 57),
    "lseek": (8, 62),
    "open": (2, None),
    "openat": (257, 56),
    "stat": (4, None),
    "lstat": (6, None),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "poll": (7, None),
    "ppoll": (271, 73),
    "select": (23, None),
    "pselect6": (270, 72),
    # the socket by which the server reaches the process, which cannot make another one
    "recvmsg": (47, 212),
    "sendmsg": (46, 211),
    "getsockname": (51, 204),
    # memory
    "brk": (12, 214),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "futex": (202, 98),
    # signals of the process itself
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "setitimer": (38, 103),
    "getitimer": (36, 102),
    "alarm": (37, None),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    # time
    "time": (201, None),
    "gettimeofday": (96, 169),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    # facts about the process and the machine
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getpgrp": (111, None),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "sched_getaffinity": (204, 123),
    "getrandom": (318, 278),
    # the end of the process, and the start of a forked one
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    "sched_yield": (24, 124),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "rseq": (334, 293),
}
PRCTL = (157, 167)
PRLIMIT64 = (302, 261)
FCNTL = (72, 25)
CLONE = (56, 220)
CLONE3 = (435, 435)
FORK = (57, None)

# The only flags of clone with which libraries fork: CLONE_CHILD_SETTID, CLONE_CHILD_CLEARTID and SIGCHLD in glibc, only
# SIGCHLD in musl. Others make threads, share memory or enter namespaces. (include/uapi/linux/sched.h)
FORK_FLAGS = (0x01200011, 0x00000011)

# include/uapi/linux/bpf_common.h and filter.h
LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K

# include/uapi/linux/seccomp.h
SET_MODE_FILTER = 1
NEW_LISTENER = 1 << 3
ALLOW = 0x7FFF0000
USER_NOTIF = 0x7FC00000
KILL_PROCESS = 0x80000000
REFUSE = 0x00050000 | errno.EPERM
NOT_IMPLEMENTED = 0x00050000 | errno.ENOSYS  # makes glibc use clone, whose flags a filter can see, instead of clone3
NOTIFICATION_SIZE = 80  # of struct seccomp_notif
RECEIVE = 0xC0502100  # SECCOMP_IOCTL_NOTIF_RECV: _IOWR('!', 0, struct seccomp_notif)
SEND = 0xC0182101  # SECCOMP_IOCTL_NOTIF_SEND: _IOWR('!', 1, struct seccomp_notif_resp)
CONTINUE = 1  # SECCOMP_USER_NOTIF_FLAG_CONTINUE

# offsets in struct seccomp_data {int nr; u32 arch; u64 instruction_pointer; u64 args[6]}
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16


def program(machine: linux.Machine) -> bytes:
    """The filter as an array of struct sock_filter."""
    code = [
        _instruction(LOAD_WORD, ARCHITECTURE),
        _instruction(JUMP_IF_EQUAL, machine.audit_arch, if_true=1),
        _instruction(RETURN, KILL_PROCESS),
        _instruction(LOAD_WORD, NUMBER),
    ]
    for numbers in ALLOWED.values():
        code += _for_call(machine, numbers, [_instruction(RETURN, ALLOW)])
    die_with_server = _if_argument(0, (linux.PR_SET_PDEATHSIG,), _if_argument(1, (signal.SIGKILL,), _result(ALLOW)))
    code += _for_call(machine, PRCTL, die_with_server)
    # prlimit64(pid, resource, new limit, old limit) reads a limit if the pointer to the new one is 0.
    code += _for_call(machine, PRLIMIT64, _if_argument(2, (0,), _if_upper_half(2, 0, _result(ALLOW))))
    # fcntl can also make the kernel send signals (F_SETOWN), so only these.
    commands = (fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_DUPFD_CLOEXEC)
    code += _for_call(machine, FCNTL, _if_argument(1, commands, _result(ALLOW)))
    code += _for_call(machine, CLONE, _if_argument(0, FORK_FLAGS, _if_upper_half(0, 0, _result(USER_NOTIF))))
    code += _for_call(machine, FORK, _result(USER_NOTIF))
    code += _for_call(machine, CLONE3, _result(NOT_IMPLEMENTED))
    return b"".join([*code, *_result(REFUSE)])


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """A struct sock_filter {u16 code; u8 jt; u8 jf; u32 k}; the jumps count instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _result(action: int) -> list[bytes]:
    return [_instruction(RETURN, action)]


def _for_call(machine: linux.Machine, numbers: tuple[int, int | None], then: list[bytes]) -> list[bytes]:
    """Instructions that run ``then``, which must return, if the loaded number is that of the call."""
    number = numbers[machine.column]
    return [] if number is None else [_instruction(JUMP_IF_EQUAL, number, if_false=len(then)), *then]


def _if_argument(index: int, values: tuple[int, ...], then: list[bytes]) -> list[bytes]:
    """Instructions that run ``then`` if the lower half of an argument is one of the values, else refuse."""
    code = [_instruction(LOAD_WORD, ARGUMENTS + 8 * index)]
    for position, value in enumerate(values):
        code.append(_instruction(JUMP_IF_EQUAL, value, if_true=len(values) - position))
    return [*code, *_result(REFUSE), *then]


def _if_upper_half(index: int, value: int, then: list[bytes]) -> list[bytes]:
    """Like ``_if_argument`` for the upper half. Both kinds of machines are little-endian."""
    return [
        _instruction(LOAD_WORD, ARGUMENTS + 8 * index + 4),
        _instruction(JUMP_IF_EQUAL, value, if_true=1),
        *_result(REFUSE),
        *then,
    ]


def install() -> int:
    """Filter the system calls of this process and its children from now on. The process needs PR_SET_NO_NEW_PRIVS.

    Returns:
        A file descriptor from which the server receives a notification of every fork.

    Raises:
        OSError: if the kernel has no such filters, or if this process already has one that notifies someone, as in
            some containers.
    """
    machine = linux.machine()
    if machine is None:
        raise OSError(errno.ENOSYS, "no filter for this kind of machine")
    code = program(machine)
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog {u16 len; struct sock_filter *filter}, with padding before the pointer
    header = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    return linux.syscall(linux.SECCOMP, SET_MODE_FILTER, NEW_LISTENER, ctypes.create_string_buffer(header, len(header)))


def receive(listener: int) -> tuple[int, int]:
    """The number of a notification and the process that waits for the decision.

    Raises:
        OSError: if the process has ended in the meantime.
    """
    buffer = bytearray(NOTIFICATION_SIZE)
    fcntl.ioctl(listener, RECEIVE, buffer)
    return struct.unpack_from("=QI", buffer)  # {u64 id; u32 pid; u32 flags; struct seccomp_data}


def decide(listener: int, number: int, allow: bool) -> None:
    """Let a fork go on, or make it fail with EPERM.

    Raises:
        OSError: if the process has ended in the meantime.
    """
    # struct seccomp_notif_resp {u64 id; s64 val; s32 error; u32 flags}
    answer = struct.pack("=QqiI", number, 0, 0 if allow else -errno.EPERM, CONTINUE if allow else 0)
    fcntl.ioctl(listener, SEND, bytearray(answer))
