"""Temporary files and folders: what killed processes left is removed, what a living process uses stays."""

import os
import subprocess
import sys

import pytest

from posttrain.core.errors import UsageError
from posttrain.core.files import atomic_write_text, new_folder
from posttrain.core.temporary import TemporaryFolder, process_start, temporary_file

HOLDER = """
import os, signal, sys
from pathlib import Path
from posttrain.core.temporary import TemporaryFolder, lock, temporary_file
held = TemporaryFolder(Path(sys.argv[1]), "out")
(held.path / "part").write_bytes(bytes(2_000_000))
file = temporary_file(Path(sys.argv[1]) / "rows.jsonl")
file.write_text("half")
kept = lock(file)
print("ready", flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def write_both(folder):
    with new_folder(folder / "out") as unfinished:
        (unfinished / "model").write_text("whole")
    atomic_write_text(folder / "rows.jsonl", "whole")


def test_what_killed_processes_left_is_removed_and_what_a_living_one_writes_stays(tmp_path, caplog):
    start = [sys.executable, "-c", HOLDER, str(tmp_path)]
    for _ in range(2):
        subprocess.run([*start, "killed"], check=False)
    (tmp_path / ".tmp-other-1-2").mkdir()  # of a name that is not written
    alive = subprocess.Popen([*start, "alive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert alive.stdout.readline() == "ready\n"
    assert not list(tmp_path.glob(".tmp-out-1-*")), "the third process removed what the first two had left"
    try:
        write_both(tmp_path)
        left = {".tmp-other-1-2", f".tmp-out-{alive.pid}", f".tmp-rows.jsonl-{alive.pid}"}
        assert {path.name for path in tmp_path.iterdir()} == {"out", "rows.jsonl"} | left
    finally:
        alive.kill()
        alive.communicate()
    (tmp_path / "out" / "model").unlink()
    caplog.clear()
    write_both(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "rows.jsonl", ".tmp-other-1-2"}
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"removed 1 temporary file or folder (2.0 MB) that killed processes had left in {tmp_path}"
    assert second == f"removed 1 temporary file or folder (0.0 MB) that killed processes had left in {tmp_path}"


def test_this_process_keeps_its_own(tmp_path):
    with TemporaryFolder(tmp_path, "out") as one, TemporaryFolder(tmp_path, "out") as other:
        assert one.is_dir() and other.is_dir() and one != other
        file = temporary_file(tmp_path / "a")
        file.touch()
        atomic_write_text(tmp_path / "b", "")
        assert file.exists()
    assert not one.exists() and not other.exists()


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="halfway"), new_folder(tmp_path / "out") as unfinished:
        (unfinished / "model").touch()
        raise ValueError("halfway")
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]
    with new_folder(tmp_path / "out") as unfinished:
        (unfinished / "model").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "model"]
    with pytest.raises(UsageError, match="out already exists and is not empty"), new_folder(tmp_path / "out"):
        pass


def test_the_start_of_a_process():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_start(child.pid)
    assert started >= process_start(os.getpid()) > 0
    child.communicate(b"\n")
    assert process_start(child.pid) is None
