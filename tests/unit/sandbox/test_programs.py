"""Attacks on the sandbox of programs that a model wrote, as root, as an ordinary user, and as root in a container."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.sandbox import cgroups, programs
from posttrain.sandbox.programs import IsolationError, ProgramResult, run_program

ROOT = Path(__file__).parents[3]
IS_ROOT = os.geteuid() == 0
USERS = ["root", "user", "container root"] if IS_ROOT else ["user"]
needs_isolation = pytest.mark.skipif(
    programs.isolation()[0] == "unprotected", reason=f"no isolation on this machine: {programs.isolation()[1]}"
)
SECONDS = 20.0
CALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


def run_here(program, given="", seconds=SECONDS):
    return run_program(program, given, time.monotonic() + seconds)


@pytest.fixture(scope="module", params=USERS)
def run(request):
    """Runs a program as one of these users; `run.mode` says how it is isolated."""
    if request.param == "root" or not IS_ROOT:
        run_here.mode = programs.isolation()[0]
        yield run_here
        return
    if not all(others_can_read(path) for path in (ROOT, Path(sys.prefix))):
        pytest.skip(f"other users cannot read {ROOT}, so they cannot run programs from it")
    uid = "0" if request.param == "container root" else "4242"
    command = [sys.executable, "-m", "tests.unit.sandbox.other_user", uid]
    other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    mode, problem = json.loads(other.stdout.readline())
    assert mode == "user", problem

    def run_there(program, given="", seconds=SECONDS):
        other.stdin.write(json.dumps([program, given, seconds]) + "\n")
        other.stdin.flush()
        result = ProgramResult(*json.loads(other.stdout.readline()))
        assert result.code != "isolation", result.errors
        return result

    run_there.mode = mode
    yield run_there
    other.communicate()


def others_can_read(path):
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


def printed(result):
    assert result.code == 0, result
    return json.loads(result.output)


def attempt(*statements):
    """A program that prints the error of each statement, or "done"."""
    lines = [CALL, "import json, socket\nresults = []"]
    for statement in statements:
        lines.append(f"try:\n    {statement}\n    results.append('done')")
        lines.append("except OSError as error:\n    results.append(error.strerror or str(error))")
    return "\n".join([*lines, "print(json.dumps(results))"])


def system_call(*numbers):
    """A program that makes system calls, and prints the name of each error."""
    calls = f"import errno\nfor call in {numbers!r}:\n    ctypes.set_errno(0)\n    libc.syscall(*call)\n"
    return CALL + calls + "    print(errno.errorcode.get(ctypes.get_errno(), 'done'))\n"


@needs_isolation
def test_it_runs(run):
    result = run(
        "import os\nopen('file', 'w').write('1')\nprint(open('file').read(), sorted(os.listdir()), input())", "x"
    )
    prefix = Path(sys.prefix)
    interpreter = [prefix.parts[2]] if prefix.is_relative_to("/tmp") else []  # is mounted where it is
    assert (result.code, result.output) == (0, f"1 {sorted(['file', 'program.py', *interpreter])} x\n"), result
    assert run("import sys\nsys.exit(3)").code == 3
    assert run("import os\nos.abort()").code == 128 + 6
    assert run("raise ValueError('text')").errors.endswith("ValueError: text\n")
    assert run("import numpy\nprint(numpy.arange(4).sum())").output == "6\n"  # installed packages are there


@needs_isolation
def test_ordinary_programs_can_do_what_they_need(run):
    program = """
import asyncio, multiprocessing, pathlib, sqlite3, subprocess, sys, tempfile, threading
def double(x): return 2 * x
if __name__ == "__main__":
    with multiprocessing.Pool(2) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
    assert subprocess.run([sys.executable, "-c", "print(7)"], capture_output=True).stdout == b"7\\n"
    assert asyncio.run(asyncio.sleep(0, "x")) == "x"
    thread = threading.Thread(target=print, args=("thread",))
    thread.start(); thread.join()
    with tempfile.TemporaryDirectory() as folder:
        sqlite3.connect(pathlib.Path(folder) / "data").execute("create table t (x)")
    print(pathlib.Path.home())
"""
    result = run(program)
    assert (result.code, result.output) == (0, "thread\n/tmp\n"), result


@needs_isolation
def test_it_has_no_privileges(run):
    result = run(CALL + "print(os.getuid(), os.getgid(), os.getgroups())\nprint(open('/proc/self/status').read())")
    assert result.code == 0
    ids, status = result.output.split("\n", 1)
    uid, gid, groups = ids.split(" ", 2)
    assert int(uid) > 0 and int(gid) > 0 and "0" not in groups.strip("[]").split(", ")
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(values[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}
    assert values["NoNewPrivs"] == "1" and values["Seccomp"] == "2"
    identity = ("os.setuid(0)", "os.setgid(0)", "os.setgroups([0])", "os.seteuid(0)")
    assert "done" not in printed(run(attempt(*identity)))


@needs_isolation
def test_it_sees_the_interpreter_and_its_libraries_and_nothing_else(run, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"ground_truth": "42"}\n')
    secrets = [str(data), "/etc/shadow", "/etc/passwd-", str(ROOT / "pyproject.toml"), "/var", "/home", "/sys", "/run"]
    files = printed(run(f"import json, os\nprint(json.dumps([os.path.lexists(path) for path in {secrets!r}]))"))
    assert files == [False] * len(secrets)
    paths, links = programs.visible_paths()
    top = {path.split("/")[1] for path in (*paths, *links)} | {"dev", "etc", "proc", "tmp"}
    assert set(printed(run("import json, os\nprint(json.dumps(os.listdir('/')))"))) == top
    assert sorted(printed(run("import json, os\nprint(json.dumps(os.listdir('/etc')))"))) == sorted(
        {"group", "passwd", *(path.split("/")[2] for path in paths if path.startswith("/etc/"))}
    )


@needs_isolation
def test_it_can_write_only_to_its_folder(run, tmp_path):
    place = tmp_path / "written"
    library = json.__file__
    tries = printed(
        run(
            attempt(
                f"open({str(place)!r}, 'w')",
                "open('/file', 'w')",
                "open('/etc/passwd', 'a')",
                f"open({library!r}, 'a')",
                f"os.chmod({library!r}, 0o777)",
                "os.mkdir('/usr/folder')",
                "os.rename('/etc', '/other')",
                "os.remove('/dev/null')",
                "open('/proc/self/comm', 'w').write('x')",
            )
        )
    )
    assert "done" not in tries and not place.exists()
    assert set(tries) <= {
        "No such file or directory",
        "Read-only file system",
        "Permission denied",
        "Device or resource busy",
    }


@needs_isolation
def test_its_folder_is_small(run):
    program = "for number in range(10):\n    open(f'file{number}', 'wb').write(bytes(15 * 2**20))\n"
    assert "No space left on device" in run(program).errors
    assert "File too large" in run("open('large', 'wb').write(bytes(2**25))").errors


@needs_isolation
def test_sysctls_and_devices_are_out_of_reach(run):
    tries = attempt(
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/sysrq-trigger', 'w')",
        "open('/proc/kcore', 'rb')",
        "open('/proc/keys')",
        "open('/proc/1/environ', 'rb').read()",
        "open('/proc/1/mem', 'r+b')",
        "open('/dev/kmsg')",
        "open('/dev/mem', 'rb')",
        "open('/dev/tty')",
        "os.mknod('disk', 0o60666, os.makedev(254, 0))",
        "os.mknod('memory', 0o20666, os.makedev(1, 1))",
    )
    assert "done" not in printed(run(tries))
    seen = printed(run("import json, os\nprint(json.dumps(sorted(os.listdir('/proc'))))"))
    assert seen == ["1", "2", "self", "thread-self"]
    devices = set(printed(run("import json, os\nprint(json.dumps(os.listdir('/dev')))")))
    assert devices == {"null", "zero", "full", "random", "urandom", "fd", "stdin", "stdout", "stderr", "shm"}


@needs_isolation
def test_sockets_and_fifos_of_the_machine_are_out_of_reach(run, tmp_path):
    path, name = str(tmp_path / "socket"), f"\0posttrain-{os.getpid()}"
    os.mkfifo(tmp_path / "fifo", 0o666)
    with (
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as network,
    ):
        by_path.bind(path)
        abstract.bind(name)
        for server in (by_path, abstract):
            server.listen()
        Path(path).chmod(0o777)
        tries = attempt(
            f"socket.socket(socket.AF_UNIX).connect({path!r})",
            f"socket.socket(socket.AF_UNIX).connect({name!r})",
            f"socket.create_connection(('127.0.0.1', {network.getsockname()[1]}), 2)",
            "socket.create_connection(('8.8.8.8', 53), 2)",
            f"os.open({str(tmp_path / 'fifo')!r}, os.O_RDONLY | os.O_NONBLOCK)",
            "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(socket.AF_VSOCK)",
        )
        assert printed(run(tries)) == [
            "No such file or directory",
            "Connection refused",
            "Network is unreachable",
            "Network is unreachable",
            "No such file or directory",
            *["Function not implemented"] * 3,
        ]


@needs_isolation
def test_system_calls_that_it_does_not_need_are_refused(run):
    new_user, new_mounts = 0x10000000, 0x20000
    x86 = {"unshare": 272, "clone": 56, "mount": 165, "ptrace": 101, "setns": 308, "memfd": 319, "shmget": 29}
    x86 |= {"add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "io_uring": 425, "userfaultfd": 323}
    arm = {"unshare": 97, "clone": 220, "mount": 40, "ptrace": 117, "setns": 268, "memfd": 279, "shmget": 194}
    arm |= {"add_key": 217, "request_key": 218, "keyctl": 219, "bpf": 280, "io_uring": 425, "userfaultfd": 282}
    number = arm if os.uname().machine == "aarch64" else x86
    clone3, pidfd_getfd, mount_setattr, open_tree = 435, 438, 442, 428
    calls = [
        (number["unshare"], new_user),
        (number["unshare"], new_mounts),
        (number["clone"], new_user | 17, 0, 0, 0, 0),
        (clone3, 0, 0),
        (number["setns"], 0, 0),
        (number["mount"], 0, b"/", 0, 32 | 4096, 0),  # remount writable
        (mount_setattr, -100, b"/", 0, 0, 0),
        (open_tree, -100, b"/", 1),
        (number["ptrace"], 0, 0, 0, 0),
        (pidfd_getfd, 0, 0, 0),
        (number["add_key"], b"user", b"name", b"x", 1, -3),
        (number["request_key"], b"user", b"name", 0, -3),
        (number["keyctl"], 0, -3, 1),
        (number["memfd"], b"name", 0),
        (number["shmget"], 0, 2**30, 0o1600),
        (number["bpf"], 0, 0, 0),
        (number["io_uring"], 1, 0),
        (number["userfaultfd"], 0),
    ]
    assert run(system_call(*calls)).output.split() == ["ENOSYS"] * len(calls)


@needs_isolation
def test_processes_are_limited(run):
    """Also for root, for whom the system's own limit on processes does not hold."""
    program = """
import os, time
count = 0
try:
    while count < 1000:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except OSError as error:
    print(count, error.strerror)
"""
    count, reason = run(program).output.split(" ", 1)
    assert 10 < int(count) < 64 and reason == "Resource temporarily unavailable\n"


@needs_isolation
def test_memory_is_limited_for_all_processes_together(run):
    assert "MemoryError" in run("bytearray(2**30)").errors
    program = """
import os, time
held = []
for number in range(6):
    if os.fork() == 0:
        held.append(b"x" * (200 * 2**20))
        time.sleep(1000)
print(os.wait()[1])
"""
    result = run(program)
    assert result.code == 128 + 9 or "9" in result.output.split(), result  # killed: one of them, or all
    hidden = program.replace("held = []", CALL + "held = []\nlibc.prctl(4, 0, 0, 0, 0)")  # not readable by others
    result = run(hidden)
    assert result.code == 128 + 9 or "9" in result.output.split(), result
    shared = "import mmap\nheld = []\nfor number in range(100):\n    file = open(f'/dev/shm/{number}', 'w+b')\n"
    result = run(
        shared + "    file.truncate(2**24)\n    held.append(mmap.mmap(file.fileno(), 2**24))\n"
        "    held[-1][:] = bytes(2**24)\n    file.close()\n"
    )
    assert result.code not in (0, None), result


@needs_isolation
def test_time_and_output_are_limited(run):
    start = time.monotonic()
    for program in ("while True: pass", "import time\ntime.sleep(1000)", "import signal\nsignal.pause()"):
        assert run(program, seconds=1.5).code is None
    assert run("while True: print('x' * 1000)").code is None
    assert time.monotonic() - start < SECONDS


@needs_isolation
def test_standard_input_cannot_be_changed(run):
    assert run("import os\nos.write(os.open('/proc/self/fd/0', os.O_RDWR), b'y')", "x").code == 1
    listed = run(
        "import os\nprint([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in os.listdir('/proc/self/fd')[:3]])"
    )
    assert listed.output == "['/memfd', 'pipe', 'pipe']\n", listed


@needs_isolation
def test_it_cannot_reach_other_processes(run):
    tries = attempt("os.kill(1, 9)", f"os.kill({os.getpid()}, 9)", "os.setpriority(os.PRIO_PROCESS, 1, 19)")
    assert printed(run(tries)) == ["done", "No such process", "Function not implemented"]  # process 1 ignores signals
    assert run("import os\nos.kill(0, 9)").code == 128 + 9  # its own process group
    limit = "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"
    assert "Function not implemented" in run(limit).errors


@needs_isolation
def test_the_environment_is_bare(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    result = run_here("import os\nprint(dict(os.environ))\nprint(open('/proc/self/environ').read())")
    assert "MY_TOKEN" not in result.output and result.code == 0


def processes_called(name):
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text() == f"{name}\n":
                found.append(entry.name)
        except OSError:
            continue
    return found


@needs_isolation
def test_nothing_is_left_when_the_parent_is_killed():
    """Although the program leaves its process group, wants no signal when its parent dies, and has children."""
    name = f"left-{os.getpid()}"
    program = (
        f"{CALL}import time\nlibc.prctl(15, {name.encode()!r}, 0, 0, 0)\nos.setsid()\n"
        "for _ in range(3):\n    os.fork()\n    libc.prctl(1, 0, 0, 0, 0)\ntime.sleep(1000)\n"
    )
    code = (
        "import sys, time\nfrom posttrain.sandbox.programs import run_program\n"
        "run_program(sys.argv[1], '', time.monotonic() + 1000)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, program], cwd=ROOT)
    try:
        wait_until(lambda: len(processes_called(name)) == 8, 30)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not processes_called(name), 5)


def wait_until(condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@needs_isolation
def test_control_groups_are_removed():
    before = cgroups.parent_groups()
    groups = [group for parent in before for group in parent.folder.glob(f"{cgroups.PREFIX}{os.getpid()}-*")]
    assert groups == []
    for parent in before:  # what a killed process left is removed by the next one
        left = parent.folder / f"{cgroups.PREFIX}{2**22 + 1}-left"
        left.mkdir()
        cgroups.parent_groups.cache_clear()
        cgroups.parent_groups()
        assert not left.exists()


def test_control_groups_of_version_2_are_found_above_ours(tmp_path):
    top = tmp_path / "cgroup"
    (top / "user.slice/session.scope").mkdir(parents=True)
    for folder, controllers in (
        (top, "cpu memory pids"),
        (top / "user.slice", "memory pids"),
        (top / "user.slice/session.scope", ""),
    ):
        (folder / "cgroup.subtree_control").write_text(controllers)
    (tmp_path / "cgroup_of_process").mkdir()
    proc = tmp_path / "cgroup_of_process"
    (proc / "cgroup").write_text("0::/user.slice/session.scope\n")
    (proc / "mountinfo").write_text(f"31 24 0:26 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n")
    [parent] = cgroups._candidates(proc)
    assert parent == cgroups.ParentGroup(top / "user.slice", {"memory": "memory.max", "pids": "pids.max"})


@pytest.fixture
def no_isolation(monkeypatch):
    """As on a machine without libseccomp."""

    def fail():
        raise OSError("libseccomp.so.2 is not installed")

    monkeypatch.setattr(programs, "compile_filter", fail)
    programs.isolation.cache_clear()
    yield
    programs.isolation.cache_clear()


def test_without_isolation_it_refuses(no_isolation):
    with pytest.raises(IsolationError, match=r"libseccomp.so.2 is not installed"):
        run_here("print(1)")


def test_without_isolation_limits_still_hold_if_it_is_allowed(no_isolation):
    def run_unprotected(program):
        return run_program(program, "x", time.monotonic() + SECONDS, allow_unprotected=True)

    result = run_unprotected("import os\nopen('file', 'w').write('1')\nprint(sorted(os.listdir()), input())")
    assert (result.code, result.output) == (0, "['file', 'program.py'] x\n"), result
    assert "MemoryError" in run_unprotected("x = bytearray(2**30)").errors
    assert "File too large" in run_unprotected("open('large', 'wb').write(b'x' * 2**25)").errors
    assert run_unprotected("print('x' * 2**22)").code is None
    assert run_unprotected("import os\nos.abort()").code == 128 + 6
