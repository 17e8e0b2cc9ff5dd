"""Landlock: a process gives up access to files, TCP ports, and to signals and sockets of other processes.

Described in Documentation/userspace-api/landlock.rst of the Linux sources, with constants in
include/uapi/linux/landlock.h. What a kernel can restrict depends on the version of its Landlock ABI. What a process
gives up, its children cannot get back.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from burnish.rl.sandbox import linux

CREATE_RULESET_VERSION = 1
RULE_PATH_BENEATH = 1

READ_FILE = 1 << 2
READ_DIR = 1 << 3
# The rights on files that each version of the ABI knows, as the number of bits: version 2 added REFER, 3 TRUNCATE and
# 5 IOCTL_DEV.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
BIND_AND_CONNECT_TCP = 0b11
ABSTRACT_UNIX_SOCKETS_AND_SIGNALS = 0b11
TCP_SINCE, SIGNALS_SINCE = 4, 6  # versions


def restrict(readable: Iterable[str], listed: Iterable[str]) -> int:
    """Give up everything that Landlock restricts, except for reading, and return the version of the ABI.

    The process needs PR_SET_NO_NEW_PRIVS. Files that are open stay open.

    Args:
        readable: files and folders that stay readable, with all that is in them.
        listed: folders whose files, and those of folders in them, can be listed and not read.

    Raises:
        OSError: if the kernel has no Landlock.
    """
    version = linux.syscall(linux.LANDLOCK_CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    # struct landlock_ruleset_attr {u64 handled_access_fs, handled_access_net, scoped}; older versions know less of it
    rights = (1 << FILE_RIGHTS[min(version, max(FILE_RIGHTS))]) - 1
    attributes = struct.pack("=Q", rights)
    if version >= TCP_SINCE:
        attributes += struct.pack("=Q", BIND_AND_CONNECT_TCP)
    if version >= SIGNALS_SINCE:
        attributes += struct.pack("=Q", ABSTRACT_UNIX_SOCKETS_AND_SIGNALS)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = linux.syscall(linux.LANDLOCK_CREATE_RULESET, buffer, len(attributes), 0)
    try:
        for path in readable:
            _allow(ruleset, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
        for path in listed:
            _allow(ruleset, path, READ_DIR)
        linux.syscall(linux.LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        # struct landlock_path_beneath_attr {u64 allowed_access; s32 parent_fd}, packed
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, folder), 12)
        linux.syscall(linux.LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(folder)
