"""The run folder: names, the lock, metrics after a resume, signals."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from posttrain.checkpoints.checkpoint import newest_valid, write_checkpoint
from posttrain.core.errors import UsageError
from posttrain.core.files import atomic_write_text
from posttrain.train.run_directory import RunDirectory, StopSignals, find_run


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def start_run(out: str = "", verb: str = "sft") -> Path:
    with RunDirectory.open(out, verb, resume=False) as folder:
        folder.write_config("seed: 0\n")
        return folder.path


def test_default_names_count_up():
    names = [start_run(), start_run(), start_run(verb="dpo")]
    assert [str(name) for name in names] == ["runs/sft-001", "runs/sft-002", "runs/dpo-001"]
    Path("runs/sft-041").mkdir()
    Path("runs/sft-1000x").mkdir()
    assert str(start_run()) == "runs/sft-042"


def test_two_at_once_get_different_folders():
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: RunDirectory.open("", "sft", resume=False), range(24)))
    assert len({folder.path for folder in folders}) == 24
    for folder in folders:
        folder.close()


def test_paths():
    with RunDirectory.open("x", "sft", resume=False) as folder:
        names = ("config_file", "samples", "checkpoints", "logs", "bad_batches")
        parts = [getattr(folder, name).relative_to("x").as_posix() for name in names]
    assert parts == ["config.yaml", "samples", "checkpoints", "logs", "bad-batches"]


def test_resume_takes_the_highest_number_that_holds_a_run():
    for _ in range(11):
        start_run()
    Path("runs/sft-012").mkdir()  # a start that failed before it began
    with RunDirectory.open("", "sft", resume=True) as folder:
        assert str(folder.path) == "runs/sft-011"
    assert str(find_run("", "sft")) == "runs/sft-011"


def test_resume_without_a_run_is_refused_and_makes_nothing():
    for out in ("", "nowhere"):
        with pytest.raises(UsageError, match="no run to resume"):
            RunDirectory.open(out, "sft", resume=True)
    assert list(Path().iterdir()) == []


def test_a_folder_with_a_run_is_refused_and_stays_as_it_is():
    start_run("x")
    with pytest.raises(UsageError, match="already holds a run") as caught:
        RunDirectory.open("x", "sft", resume=False)
    assert "--resume" in str(caught.value)
    assert "--out" in str(caught.value)
    with RunDirectory.open("x", "sft", resume=True) as folder:  # the refusal must not keep the lock
        assert folder.config_file.read_text() == "seed: 0\n"


def test_checkpoints_alone_are_a_run():
    write_checkpoint(Path("x/checkpoints"), 1, lambda folder: atomic_write_text(folder / "state.json", "{}"))
    with pytest.raises(UsageError, match="already holds a run"):
        RunDirectory.open("x", "sft", resume=False)
    RunDirectory.open("x", "sft", resume=True).close()


def test_other_files_are_no_run():
    Path("x").mkdir()
    Path("x/notes.txt").write_text("mine")
    start_run("x")
    assert Path("x/notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_named():
    Path("x").write_text("")
    with pytest.raises(UsageError, match="x: cannot be used"):
        RunDirectory.open("x", "sft", resume=False)
    Path("runs").write_text("")
    with pytest.raises(UsageError, match="runs"):
        RunDirectory.open("", "sft", resume=False)


def test_opening_removes_what_a_killed_save_left():
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    start_run("x")
    Path(f"x/checkpoints/.tmp-step-00000001-{dead.pid}/model").mkdir(parents=True)
    with RunDirectory.open("x", "sft", resume=True) as folder:
        assert list(folder.checkpoints.iterdir()) == []
        assert newest_valid(folder.checkpoints) is None


def test_the_second_is_refused_at_once_and_told_who():
    with RunDirectory.open("x", "sft", resume=False) as folder:
        folder.write_config("")
        for resume in (False, True):
            with pytest.raises(UsageError, match=f"process {os.getpid()} on ") as caught:
                RunDirectory.open("x", "sft", resume=resume)
            assert caught.value.exit_code == 2
        assert f"process {os.getpid()} " in (folder.path / "lock").read_text()
    RunDirectory.open("x", "sft", resume=True).close()


HOLDER = """
import os, sys
from posttrain.train.run_directory import RunDirectory
folder = RunDirectory.open("x", "sft", resume=False)
folder.write_config("")
if "fork" in sys.argv and os.fork() == 0:
    os.write(1, b"child\\n")  # in one piece, whoever else writes
    sys.stdin.read()
    os._exit(0)
os.write(1, b"open\\n")
sys.stdin.read()
"""


@pytest.mark.parametrize("children", [[], ["fork"]])
def test_the_lock_of_a_killed_process_is_free(children):
    """Also where a forked child of it lives on, as a worker of a pool may."""
    command = [sys.executable, "-c", HOLDER, *children]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        for _ in range(1 + len(children)):
            assert holder.stdout.readline().split()[0] in ("open", "child")
        with pytest.raises(UsageError, match=f"process {holder.pid} "):
            RunDirectory.open("x", "sft", resume=True)
        holder.kill()
        os.waitpid(holder.pid, 0)
        with RunDirectory.open("x", "sft", resume=True) as folder:
            assert (folder.path / "lock").read_text().split()[1] == str(os.getpid())


def test_a_bad_batch_is_kept():
    with RunDirectory.open("x", "sft", resume=False) as folder:
        path = folder.write_bad_batch(7, [{"origin": "a:1"}, {"origin": "a:2"}])
        assert path.parent == folder.bad_batches
        assert [json.loads(line)["origin"] for line in path.read_text().splitlines()] == ["a:1", "a:2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_the_second_ends(number, capfd):
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    with StopSignals() as signals:
        assert signals.received is None
        signal.raise_signal(number)
        assert signals.received == number
        assert capfd.readouterr().err.strip() == "stopping after this step; send the signal again to stop immediately"
        with pytest.raises((KeyboardInterrupt, SystemExit)) as caught:
            signal.raise_signal(number)
    if number == signal.SIGTERM:
        assert caught.value.code == 143
    else:
        assert caught.type is KeyboardInterrupt
    assert {n: signal.getsignal(n) for n in before} == before


def test_signals_are_left_alone_in_other_threads():
    handlers = []

    def work():
        with StopSignals() as signals:
            handlers.append(signal.getsignal(signal.SIGTERM))
            handlers.append(signals.received)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM), None]
