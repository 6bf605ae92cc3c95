"""The filter of system calls for programs that a model wrote, compiled by libseccomp.

A list of what is allowed: anything else, also calls of kernels to come, fails with "Function not implemented". Left out
are calls that need privileges, that reach other processes' memory, kernel interfaces with a history of security faults
(io_uring, bpf, userfaultfd, keyrings, user namespaces), and memory that limits on a process do not count (memfd, System
V shared memory).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from functools import cache

FILES = """
    access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fstat fstatfs
    fsync ftruncate futimesat getcwd getdents getdents64 getxattr inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch ioctl lchown lgetxattr link linkat listxattr llistxattr lseek lstat mkdir mkdirat mknod mknodat
    newfstatat open openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat
    readv rename renameat renameat2 rmdir sendfile splice stat statfs statx symlink symlinkat tee truncate umask unlink
    unlinkat utime utimensat utimes write writev
"""
MEMORY = "brk madvise membarrier mincore mlock mlock2 mmap mprotect mremap msync munlock munmap"
PROCESSES = """
    arch_prctl capget capset execve execveat exit exit_group fork futex futex_waitv get_robust_list getcpu getegid
    geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
    getrusage getsid gettid getuid kill pidfd_open pidfd_send_signal prctl restart_syscall riscv_flush_icache
    riscv_hwprobe rseq sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
    sched_getscheduler sched_rr_get_interval sched_yield set_robust_list set_tid_address setgid setpgid setregid
    setresgid setresuid setreuid setrlimit setsid setuid sysinfo tgkill times tkill uname vfork wait4 waitid
"""
SIGNALS = """
    alarm getitimer pause rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
    rt_sigtimedwait rt_tgsigqueueinfo setitimer sigaltstack signalfd signalfd4
"""
TIME = """
    clock_getres clock_gettime clock_nanosleep gettimeofday nanosleep time timer_create timer_delete timer_getoverrun
    timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime
"""
WAITING = """
    epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 pipe pipe2 poll ppoll
    pselect6 select
"""
SOCKETS = """
    accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
    sendto setsockopt shutdown
"""
# Only for the calling process (0), not for the process that watches it.
OWN_PROCESS = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
ALLOWED = " ".join((FILES, MEMORY, PROCESSES, SIGNALS, TIME, WAITING, SOCKETS)).split()
FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)  # not AF_VSOCK: it reaches the host of a virtual machine
CLONE_NAMESPACES = 0x7E020000  # all CLONE_NEW* flags; clone3, whose flags a filter cannot see, is not allowed

# libseccomp's interface (seccomp.h).
ACT_ALLOW, ACT_ERRNO = 0x7FFF0000, 0x00050000
CMP_EQ, CMP_MASKED_EQ = 4, 7
ATTRIBUTE_OPTIMIZE, BINARY_TREE = 8, 2
UNKNOWN = -1


class ArgumentCondition(ctypes.Structure):
    """struct scmp_arg_cmp: a condition on one argument of a system call."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


def equal(argument: int, value: int) -> ArgumentCondition:
    return ArgumentCondition(argument, CMP_EQ, value, 0)


@cache
def compile_filter() -> bytes:
    """Return the filter as instructions for the kernel; an OSError if libseccomp is not installed."""
    library = _libseccomp()
    context = library.seccomp_init(ACT_ERRNO | errno.ENOSYS)
    if not context:
        raise OSError("libseccomp: seccomp_init failed")
    try:
        library.seccomp_attr_set(context, ATTRIBUTE_OPTIMIZE, BINARY_TREE)  # older versions lack it
        for name in ALLOWED:
            _allow(library, context, name)
        for name in OWN_PROCESS:
            _allow(library, context, name, equal(0, 0))
        _allow(library, context, "setpriority", equal(0, os.PRIO_PROCESS), equal(1, 0))
        for family in FAMILIES:
            _allow(library, context, "socket", equal(0, family))
        _allow(library, context, "socketpair", equal(0, socket.AF_UNIX))
        _allow(library, context, "clone", ArgumentCondition(0, CMP_MASKED_EQ, CLONE_NAMESPACES, 0))
        return _export(library, context)
    finally:
        library.seccomp_release(context)


def _libseccomp() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise OSError(
            "libseccomp.so.2 is not installed; install libseccomp2 (Debian, Ubuntu) or libseccomp (Fedora, RHEL)"
        ) from None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = (ctypes.c_uint32,)
    library.seccomp_attr_set.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
    library.seccomp_syscall_resolve_name.argtypes = (ctypes.c_char_p,)
    library.seccomp_rule_add_array.argtypes = (
        ctypes.c_void_p,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_void_p,
    )
    library.seccomp_export_bpf.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.seccomp_release.argtypes = (ctypes.c_void_p,)
    library.seccomp_release.restype = None
    return library


def _allow(library: ctypes.CDLL, context: int, name: str, *conditions: ArgumentCondition) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number == UNKNOWN:  # newer than this libseccomp
        return
    array = (ArgumentCondition * len(conditions))(*conditions)
    failed = library.seccomp_rule_add_array(context, ACT_ALLOW, number, len(conditions), array)
    if failed:
        raise OSError(-failed, f"libseccomp: rule for {name}: {os.strerror(-failed)}")


def _export(library: ctypes.CDLL, context: int) -> bytes:
    file = os.memfd_create("seccomp")
    try:
        failed = library.seccomp_export_bpf(context, file)
        if failed:
            raise OSError(-failed, f"libseccomp: export: {os.strerror(-failed)}")
        size = os.fstat(file).st_size
        return os.pread(file, size, 0)
    finally:
        os.close(file)
