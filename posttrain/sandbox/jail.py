"""Isolates and runs one Python program that a model wrote: `python -I -S -B jail.py SETTINGS STATUS`, two descriptors.

programs.py starts it and docs/rewards.md lists what it closes. There are three processes:

outer     makes the namespaces, waits, and passes the exit code on
init      is process 1 inside: builds the file system, gives up all privileges, ends everything when the program ends
program   sets its limits and its system-call filter, then executes the interpreter

Each dies with its parent, and with `init` the kernel kills everything inside. A failure before the program starts is
written to STATUS. This file imports only the standard library, and little of it, as it runs for every program.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

# Numbers of the kernel's interface (linux/sched.h, mount.h, prctl.h, capability.h).
CLONE_NEWUSER = 0x10000000
CLONE_OTHERS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000  # mnt cgroup uts ipc pid net
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_SETATTR = 442  # the number of this system call is the same on all machines
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}  # elsewhere also the arguments of clone may differ
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

INSIDE_UID = 1000  # in a user namespace
FIRST_FREE_UID = 2**30  # as root: no account has such a number, and each program gets its own
NOBODY = 65534  # as root in a container that has fewer user ids
FOLDER = "/tmp"  # inside: the only place that can be written to
FOLDER_OPTIONS = "size=64m,nr_inodes=4096,mode=1777"
DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
WATCH_SECONDS = 0.02  # between two sums of memory, where no control group limits it
FAILED = 125  # exit code if the program was not started
KILLED = 128  # plus the number of the signal

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    descriptor, status = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(descriptor, "rb") as file:
        settings = json.loads(file.read())
    os.set_inheritable(status, False)  # closed by a successful start of the program
    or_report(status, outer, settings, status)


def or_report(status: int, step: Callable[..., NoReturn], *arguments: Any) -> NoReturn:
    """Call a step that does not return; what it raises is written to `status`, and the process ends."""
    try:
        step(*arguments)
    finally:  # reached only by an exception: no process may continue with only some of its limits
        try:
            error = sys.exc_info()[1]
            os.write(status, f"{type(error).__name__}: {error}".encode("utf-8", "replace")[:2000])
        finally:
            os._exit(FAILED)


def raise_if_failed(result: int, action: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{action}: {os.strerror(error)}")


def outer(settings: dict[str, Any], status: int) -> NoReturn:
    """Make the namespaces and wait for `init`."""
    die_with_parent()
    if os.getppid() != settings["parent"]:
        os._exit(FAILED)
    signal.alarm(int(settings["seconds"]) + 2)  # the parent ends it at its deadline, if it can
    try:
        for file in settings["groups"]:
            write_file(file, str(os.getpid()))
    except OSError:  # a machine may let us make a control group and not enter it
        settings["watched_memory"] = settings["memory"]
    if settings["mode"] == "unprotected":
        os.chdir(settings["folder"])
        start(settings)
    uid = FIRST_FREE_UID + os.getpid()
    if settings["mode"] == "root":
        raise_if_failed(libc.unshare(CLONE_OTHERS), "unshare")
    else:
        if os.geteuid() == 0:
            become(uid)
        enter_user_namespace()
    die_with_parent()  # a change of user ids clears it
    alive, held = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(held)
        or_report(status, init, settings, status, uid, alive)
    os.close(status)
    os._exit(exit_code(os.waitpid(process, 0)[1]))


def enter_user_namespace() -> None:
    """Make all namespaces with the rights of an ordinary user, which has the id 1000 inside."""
    uid, gid = os.geteuid(), os.getegid()
    libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else the files in /proc/self belong to root
    raise_if_failed(libc.unshare(CLONE_NEWUSER | CLONE_OTHERS), "unshare")
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{INSIDE_UID} {uid} 1")
    write_file("/proc/self/gid_map", f"{INSIDE_UID} {gid} 1")


def init(settings: dict[str, Any], status: int, uid: int, alive: int) -> NoReturn:
    """Build the file system, give up all privileges, start the program and wait for it."""
    os.setsid()  # out of the process group of `outer`, which the program could signal
    build_root(settings, INSIDE_UID if settings["mode"] == "user" else uid)
    drop_privileges(uid if settings["mode"] == "root" else None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program, which has the same user id, cannot change this process
    die_with_parent()
    if is_closed(alive):  # `outer` ended before that was in force
        os._exit(FAILED)
    program = os.fork()
    if program == 0:
        or_report(status, start, settings)
    os.closerange(0, 256)
    watch(program, settings["watched_memory"])


def start(settings: dict[str, Any]) -> NoReturn:
    """Set limits and the system-call filter, then become the program."""
    for name, value in settings["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
    python, program = settings["python"], settings["program"]
    raise_if_failed(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    filter_system_calls(bytes.fromhex(settings["seccomp"]))
    os.execve(python, [python, "-I", "-B", program], settings["env"])


# The file system


def build_root(settings: dict[str, Any], uid: int) -> None:
    """Replace the file system by one in memory: /tmp, the interpreter and its libraries (read-only), /proc and /dev."""
    base = settings["base"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{base}/old")
    os.mkdir(f"{base}/new")
    mount("tmpfs", f"{base}/new", "tmpfs", MS_NOSUID | MS_NODEV, "size=4m,mode=755")
    pivot_root(base, f"{base}/old")  # /old is the machine's file system, /new will be the only one
    os.chdir("/")
    os.mkdir(f"/new{FOLDER}")
    mount("tmpfs", f"/new{FOLDER}", "tmpfs", MS_NOSUID | MS_NODEV, FOLDER_OPTIONS)
    for path in settings["paths"]:
        bind(path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for path, target in settings["links"].items():
        os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)
        if not os.path.lexists(f"/new{path}"):
            os.symlink(target, f"/new{path}")
    os.makedirs("/new/dev/shm")
    for name in DEVICES:
        bind(f"/dev/{name}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"/new/dev/{name}")
    mount("tmpfs", "/new/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=16m,nr_inodes=256,mode=1777")
    os.mkdir("/new/proc")
    # Only the processes inside, no sysctls or devices of the kernel. A container may refuse it: then /proc is empty.
    flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    libc.mount(b"proc", b"/new/proc", b"proc", flags, b"subset=pid")
    os.makedirs("/new/etc", exist_ok=True)
    write_file("/new/etc/passwd", f"sandbox:x:{uid}:{uid}::{FOLDER}:/bin/false\n")
    write_file("/new/etc/group", f"sandbox:x:{uid}:\n")
    write_file(f"/new{settings['program']}", settings["source"])
    raise_if_failed(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.chdir("/new")
    pivot_root(".", ".")
    raise_if_failed(libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir(FOLDER)
    set_attributes("/", ATTR_RDONLY, 0)
    raise_if_failed(libc.sethostname(b"sandbox", 7), "sethostname")


def bind(path: str, attributes: int) -> None:
    """Show a file or directory of the machine under the same path inside."""
    source, target = f"/old{path}", f"/new{path}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        write_file(target, "")
    mount(source, target, None, MS_BIND | MS_REC)
    set_attributes(target, attributes, AT_RECURSIVE)


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, options)]
    raise_if_failed(libc.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]), f"mount {target}")


def set_attributes(path: str, attributes: int, flags: int) -> None:
    values = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)  # struct mount_attr: attr_set, attr_clr, propagation, userns_fd
    arguments = (AT_FDCWD, path.encode(), flags, ctypes.byref(values), ctypes.sizeof(values))
    raise_if_failed(libc.syscall(MOUNT_SETATTR, *arguments), f"mount_setattr {path}")


def pivot_root(new: str, old: str) -> None:
    machine = os.uname().machine
    if machine not in PIVOT_ROOT:
        raise OSError(f"no isolation on {machine} processors")
    raise_if_failed(libc.syscall(PIVOT_ROOT[machine], new.encode(), old.encode()), "pivot_root")


def write_file(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    unsent = text.encode("utf-8", "replace")
    while unsent:
        unsent = unsent[os.write(descriptor, unsent) :]
    os.close(descriptor)


# Privileges


def become(uid: int) -> None:
    """Become another user, and no other group."""
    os.setgroups([])
    try:
        os.setresgid(uid, uid, uid)
    except OSError:  # a container may have fewer ids
        uid = NOBODY
        os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_privileges(uid: int | None) -> None:
    """Give up all capabilities for good and, as root, become another user."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers that the kernel does not know
    if uid is not None:
        become(uid)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    raise_if_failed(libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    raise_if_failed(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


class FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_system_calls(instructions: bytes) -> None:
    """Install a filter that libseccomp compiled; each instruction has 8 bytes."""
    if instructions:
        program = FilterProgram(len(instructions) // 8, instructions)
        raise_if_failed(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "seccomp")


# Processes


def die_with_parent() -> None:
    raise_if_failed(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "pdeathsig")


def is_closed(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def watch(program: int, memory: int) -> NoReturn:
    """Wait for the program and end with its exit code, or when all processes together have more than `memory` bytes.

    `memory` is 0 where a control group has the limit.
    """
    while True:
        process, status = os.waitpid(-1, os.WNOHANG if memory else 0)
        if process == program:
            os._exit(exit_code(status))
        if process == 0:
            if memory and used_memory() > memory:
                os._exit(KILLED + signal.SIGKILL)
            time.sleep(WATCH_SECONDS)


def used_memory() -> int:
    """Add up the memory of the processes inside, in bytes; a page that several of them share counts once."""
    return sum(memory_of(name) for name in os.listdir("/proc") if name.isdigit())


def memory_of(process: str) -> int:
    try:
        with open(f"/proc/{process}/smaps_rollup", "rb") as file:
            lines = file.read().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"Pss:"))
    except OSError:  # it hides this file, or has ended
        pass
    try:
        with open(f"/proc/{process}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0


def exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else KILLED - code


if __name__ == "__main__":
    main()
