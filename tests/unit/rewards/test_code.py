"""The sandbox, where this system allows one: no network, nothing to write, nobody to see."""

import os
import time

import pytest

from posttrain.sandbox.programs import can_isolate, command, run_program

needs_namespaces = pytest.mark.skipif(not can_isolate(), reason="this system allows no user namespaces")


def run(program):
    return run_program(program, "", time.monotonic() + 20)


def test_it_runs():
    outcome = run("import os\nopen('file', 'w').write('1')\nprint(open('file').read(), sorted(os.listdir()))")
    assert outcome.code == 0 and outcome.output.startswith("1 ['file',"), outcome
    assert run("import sys\nsys.exit(3)").code == 3


def test_limits_hold_without_namespaces_too(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.sandbox.programs.can_isolate", lambda: False)
    assert "MemoryError" in run("x = bytearray(2**30)").errors
    assert "File too large" in run("open('large', 'wb').write(b'x' * 2**25)").errors
    assert run("print('x' * 2**22)").code is None


@needs_namespaces
def test_nothing_can_be_written_outside(tmp_path):
    place = tmp_path / "written"
    outcome = run(f"open({str(place)!r}, 'w')")
    assert outcome.code == 1 and "Read-only file system" in outcome.errors
    assert not place.exists()


@needs_namespaces
def test_there_is_no_network_and_no_other_process():
    assert "unreachable" in run("import socket\nsocket.create_connection(('127.0.0.1', 9), 2)").errors
    seen = run("import os\nprint([name for name in os.listdir('/proc') if name.isdigit()])").output
    assert seen.strip() in ("['1']", "[]")
    assert run(f"import os\nos.kill({os.getpid()}, 9)").code == 1


@needs_namespaces
def test_privileges_cannot_be_had_back(tmp_path):
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.mount(b'none', b'/', None, 32 | 4096, None), libc.umount(b'/proc'))\n"  # remount writable
        "libc.unshare(0x10000000 | 0x20000)\n"  # new user and mount namespace
        "print(libc.mount(b'none', b'/', None, 32 | 4096, None))\n"
        f"try:\n    open({str(tmp_path / 'written')!r}, 'w')\nexcept OSError as error:\n    print(error.strerror)\n"
    )
    outcome = run(program)
    assert outcome.output.split("\n")[:3] == ["-1 -1", "-1", "Read-only file system"], outcome


def test_the_environment_is_bare(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert "MY_TOKEN" not in run("import os\nprint(dict(os.environ))").output
    assert "secret" not in " ".join(command("folder", "program", 1.0, True))
