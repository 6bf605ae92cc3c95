"""A save, a replacement and a deletion, killed around every change on the disk: no good checkpoint is ever lost.

Run as a script this file plays one scenario: it forks a child for each n, which dies at the n-th point (`os._exit`, as
abrupt as SIGKILL for what is in the folder), until one child comes through. A fork is cheap where pytest and torch are
not loaded, hence the script.
"""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from posttrain.checkpoints import checkpoint
from posttrain.checkpoints.checkpoint import (
    delete_old_checkpoints,
    is_valid,
    list_checkpoints,
    newest_valid,
    remove_temporaries,
    step_of,
    write_checkpoint,
)
from posttrain.core import files
from posttrain.core.errors import CheckpointError

Step = Callable[[Path], object]

KILLED = 9


def content(step: int, mark: str) -> dict[str, bytes]:
    return {
        "model/config.json": b'{"mark": "%s"}' % mark.encode(),
        "model/weights.bin": bytes([step]) * 5000,
        "state.json": json.dumps({"step": step, "mark": mark}).encode(),
    }


def save(checkpoints: Path, step: int, mark: str = "first") -> Path:
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        for name, data in content(step, mark).items():
            with (folder / name).open("wb") as file:
                file.write(data[:10])
                file.flush()
                file.write(data[10:])

    return write_checkpoint(checkpoints, step, write)


def read(path: Path) -> dict[str, bytes]:
    """What a checkpoint holds, by name, without its manifest."""
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    del files["manifest.json"]
    return files


class Death:
    """Ends the process at the n-th point. Points are: before each change of the file system, at each fsync, at the
    first line of checkpoint.py or files.py after each of them (nothing differs until the next), and at each line of
    a writer."""

    def __init__(self, n: int) -> None:
        self.left = n
        self.changed = True

    def point(self) -> None:
        self.left -= 1
        if self.left <= 0:
            os._exit(KILLED)

    def change(self, event: str, arguments: tuple[Any, ...]) -> None:
        opened_to_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if opened_to_write or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "fsync"):
            self.changed = True
            self.point()

    def lines(self, frame: FrameType, event: str, _: Any) -> Any:
        writer = frame.f_code.co_filename == __file__ and frame.f_code.co_name == "write"
        if not writer and frame.f_code.co_filename not in (checkpoint.__file__, files.__file__):
            return None
        if event == "line" and (writer or self.changed):
            self.changed = False
            self.point()
        return self.lines

    def arm(self) -> None:
        os.fsync = lambda descriptor: self.change("fsync", ())
        sys.addaudithook(self.change)
        sys.settrace(self.lines)


def kill_everywhere(work: Path, prepare: Step, act: Step, check: Callable[[Path, bool], None]) -> int:
    """Run `act` in children that die at point 1, 2, ...; after each, `check(folder, finished)`. Returns the points."""
    prepare(work / "prepared")
    for n in range(1, 100_000):
        folder = work / "try"
        shutil.copytree(work / "prepared", folder)
        child = os.fork()
        if child == 0:
            Death(n).arm()
            act(folder)
            sys.settrace(None)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, KILLED), f"point {n}: the child ended with {status}"
        try:
            check(folder, status == 0)
            a_following_save_works(folder)
        except BaseException:
            print(f"after death at point {n}: {sorted(str(path.relative_to(folder)) for path in folder.rglob('*'))}")
            raise
        shutil.rmtree(folder)
        if status == 0:
            return n - 1
    raise AssertionError("it never came to an end")


def a_following_save_works(folder: Path) -> None:
    remove_temporaries(folder)
    for path in list_checkpoints(folder):
        assert is_valid(path), path
    path = save(folder, 99, "next")
    assert read(path) == content(99, "next")
    assert newest_valid(folder) == path
    assert all(entry.name.startswith("step-") and entry.suffix == "" for entry in folder.iterdir())


def new_step(work: Path) -> int:
    def check(folder: Path, finished: bool) -> None:
        path = newest_valid(folder)
        assert path is not None
        assert step_of(path) in ((2,) if finished else (1, 2))
        assert read(path) == content(step_of(path), "first")
        assert all(is_valid(entry) for entry in list_checkpoints(folder))

    return kill_everywhere(work, lambda folder: save(folder, 1), lambda folder: save(folder, 2), check)


def same_step(work: Path) -> int:
    """The only checkpoint is written again: never a moment without it."""

    def check(folder: Path, finished: bool) -> None:
        path = newest_valid(folder)
        assert path is not None
        assert read(path) in ([content(1, "second")] if finished else [content(1, "first"), content(1, "second")])

    return kill_everywhere(work, lambda folder: save(folder, 1), lambda folder: save(folder, 1, "second"), check)


def same_step_again(work: Path) -> int:
    """As above, after a replacement that was killed before it had removed the old one, and whose new one is damaged."""

    def prepare(folder: Path) -> None:
        save(folder / "aside", 1)
        (save(folder, 1, "damaged") / "state.json").write_bytes(b"")
        (folder / "aside" / "step-00000001").rename(folder / "step-00000001.old")
        (folder / "aside").rmdir()

    def check(folder: Path, finished: bool) -> None:
        path = newest_valid(folder)
        assert path is not None
        assert read(path) in ([content(1, "second")] if finished else [content(1, "first"), content(1, "second")])

    return kill_everywhere(work, prepare, lambda folder: save(folder, 1, "second"), check)


def deletion(work: Path) -> int:
    def prepare(folder: Path) -> None:
        for step in (1, 2, 3, 4):
            save(folder, step)

    def check(folder: Path, finished: bool) -> None:
        left = list_checkpoints(folder)
        assert all(read(path) == content(step_of(path), "first") and is_valid(path) for path in left)
        assert {step_of(path) for path in left} >= {1, 4}
        if finished:
            assert len(left) == 2

    return kill_everywhere(
        work,
        prepare,
        lambda folder: delete_old_checkpoints(folder, max_checkpoints=1, max_gigabytes=0, best_step=1),
        check,
    )


def torn_write(work: Path) -> int:
    """The kernel ends the child at the n-th byte of a file it writes (SIGXFSZ), the manifest's bytes included."""
    save(work, 1)
    longest = max(path.stat().st_size for path in (work / "step-00000001").rglob("*"))
    for size in [*range(0, 900, 7), longest - 1]:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            save(work, 2)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -signal.SIGXFSZ, f"{size} bytes: {status}"
        path = newest_valid(work)
        assert path is not None
        assert read(path) == content(1, "first")
        remove_temporaries(work)
        assert [entry.name for entry in work.iterdir()] == ["step-00000001"]
    save(work, 2)
    return size


SCENARIOS = {run.__name__: run for run in (new_step, same_step, same_step_again, deletion, torn_write)}


if __name__ == "__main__":
    os.fsync = lambda descriptor: None  # a kill cannot undo a completed write; power cuts are not tested here
    place = Path(sys.argv[2])
    place.mkdir()
    print(SCENARIOS[sys.argv[1]](place))
    sys.exit()


import pytest  # noqa: E402  the script does without


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_point(scenario, tmp_path):
    command = [sys.executable, __file__, scenario, str(tmp_path / "work")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-1]) > 20, done.stdout  # or the points were not seen


def expect_untouched(checkpoints: Path) -> None:
    path = newest_valid(checkpoints)
    assert path is not None
    assert read(path) == content(1, "first")
    assert [entry.name for entry in checkpoints.iterdir()] == [path.name]


def test_a_full_disk_while_the_writer_writes(tmp_path):
    save(tmp_path, 1)

    def write(folder: Path) -> None:
        (folder / "half.bin").write_bytes(bytes(1_500_000))
        with Path("/dev/full").open("wb") as file:  # the kernel's own disk that is always full
            file.write(b"x")

    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path, 2, write)
    message = str(caught.value)
    for part in (
        "No space left on device",
        "step 2",
        "1.50 MB",
        "needed: about 0.01 MB",
        "free: ",
        "untouched",
        "Free some space",
    ):
        assert part in message
    expect_untouched(tmp_path)


@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir"])
def test_a_disk_that_is_full_at_any_call(tmp_path, monkeypatch, name):
    save(tmp_path, 1)
    original = getattr(os, name)
    refused = 0
    for n in range(1, 100):
        calls = 0

        def full(*arguments, n=n, **options):
            nonlocal calls
            calls += 1
            if calls == n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, full)
            try:
                save(tmp_path, 2)
            except CheckpointError as error:
                assert "No space left" in str(error)
                refused += 1
        newest = newest_valid(tmp_path)
        assert newest is not None
        assert all(not entry.name.startswith(".") for entry in tmp_path.iterdir())
        assert is_valid(tmp_path / "step-00000001")
        shutil.rmtree(tmp_path / "step-00000002", ignore_errors=True)
        if calls < n:
            break
    assert refused >= {"fsync": 6, "rename": 1, "mkdir": 2}[name]
    assert step_of(newest) == 2


@pytest.mark.parametrize("writer", ["save(Path(), 2)", "write_checkpoint(Path(), 2, save_a_tensor)"])
def test_a_file_larger_than_the_system_allows(tmp_path, writer):
    """A limit on file sizes: the write fails half way, as on a full disk, in the real system call."""
    code = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint_kill import *
if "tensor" in {writer!r}:
    import torch
    from posttrain.checkpoints.tensor_files import save_tensors
    def save_a_tensor(folder):
        save_tensors(folder / "x.safetensors", dict(x=torch.zeros(10_000)))
save(Path(), 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    {writer}
except CheckpointError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert "File too large" in done.stdout, done.stdout + done.stderr
    expect_untouched(tmp_path)
