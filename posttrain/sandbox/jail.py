"""Runs one Python program that a model wrote: `python -I jail.py SETTINGS`, then it becomes that program.

Started by code.py inside new namespaces (user, network, processes, mounts) where the system allows them. There it makes
all files read-only but for one small folder in memory, gives up every privilege, sets limits, and executes the program.
It imports nothing of posttrain: only the standard library may be seen in there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
from typing import Any

MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
MOUNT_SETATTR = 442  # the system call has the same number on all machines
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION_3 = 0x20080522


class JailError(Exception):
    """The system does not allow it."""


def must(result: int, what: str) -> None:
    if result != 0:
        raise JailError(f"{what}: {os.strerror(ctypes.get_errno())}")


def lock_files(folder: str) -> None:
    """Everything read-only for this process and its children, but for `folder`, which is new and lies in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    must(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "keep mounts to ourselves")
    # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    arguments = (AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), ctypes.sizeof(attributes))
    must(libc.syscall(MOUNT_SETATTR, *arguments), "make files read-only")
    # The system's own table of processes would show the environment of ours; if a new one is refused, there is none.
    if libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV, None) != 0:
        must(libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4k"), "hide processes")
    options = b"size=64m,mode=0777"
    must(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), "make a folder in memory")


def drop_privileges() -> None:
    """Without capabilities, and no way to get them back: mounts cannot be undone."""
    libc = ctypes.CDLL(None, use_errno=True)
    must(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "renounce new privileges")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    must(libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "give up capabilities")


def limit(settings: dict[str, Any]) -> None:
    for name, value in settings["limits"].items():
        with contextlib.suppress(ValueError, OSError, AttributeError):  # not every system has each of them
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (least, least))


def main() -> None:
    settings = json.loads(sys.argv[1])
    folder, program = settings["folder"], settings["program"]
    if settings["isolated"]:
        with open(program, encoding="utf-8") as file:  # noqa: PTH123  pathlib is slow to import
            text = file.read()
        lock_files(folder)
        with open(program, "w", encoding="utf-8") as file:  # noqa: PTH123  the folder is empty again
            file.write(text)
        drop_privileges()
    os.chdir(folder)
    limit(settings)
    os.execve(sys.executable, [sys.executable, "-I", "-B", program], settings["env"])


if __name__ == "__main__":
    main()
