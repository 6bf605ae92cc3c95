"""Runs programs as another user than root, for tests that root runs: JSON lines in, JSON lines out.

`python -m tests.unit.sandbox.other_user UID`. UID 0 stands for root in a container: without CAP_SYS_ADMIN.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

CLONE_NEWNS, MS_REC, MS_PRIVATE, OPEN_TREE, MOVE_MOUNT = 0x20000, 0x4000, 0x40000, 428, 429
CAP_SYS_ADMIN = 21
libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def make_reachable(paths):
    """Mount what lies in a folder that only root may enter (an interpreter in root's home) where others may."""
    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    closed = {}
    for path in paths:
        for folder in reversed(Path(path).parents):
            if not folder.stat().st_mode & 1:
                closed.setdefault(folder, []).append(path)
                break
    for folder, inside in closed.items():
        trees = [check(libc.syscall(OPEN_TREE, -100, path.encode(), 1 | 0x8000)) for path in inside]
        check(libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"mode=755"))
        for path, tree in zip(inside, trees, strict=True):
            Path(path).mkdir(parents=True, exist_ok=True)
            check(libc.syscall(MOVE_MOUNT, tree, b"", -100, path.encode(), 4))


def become(uid):
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    check(libc.capget(ctypes.byref(header), ctypes.byref(data)))
    check(libc.prctl(24, CAP_SYS_ADMIN, 0, 0, 0))  # from the bounding set, so that no program gets it back
    for place in range(3):
        data[place] &= ~(1 << CAP_SYS_ADMIN)
    check(libc.capset(ctypes.byref(header), ctypes.byref(data)))


def main():
    from posttrain.sandbox.programs import IsolationError, isolation, run_program

    make_reachable({sys.base_prefix, sys.prefix})
    become(int(sys.argv[1]))
    print(json.dumps(isolation()), flush=True)
    for line in sys.stdin:
        program, given, seconds = json.loads(line)
        try:
            result = run_program(program, given, time.monotonic() + seconds)
            print(json.dumps([result.code, result.output, result.errors]), flush=True)
        except IsolationError as error:
            print(json.dumps(["isolation", "", str(error)]), flush=True)


if __name__ == "__main__":
    main()
