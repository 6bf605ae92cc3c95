"""Nothing outside a run directory is read, whatever the directory holds."""

import os

import pytest

from posttrain.board import files
from posttrain.board.files import RunFolder, complete_lines


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/run.log").write_text("secret")
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("verb: sft")
    (run / "link.txt").symlink_to(tmp_path / "secret.txt")
    (run / "logs").symlink_to(tmp_path / "outside")
    os.mkfifo(run / "pipe")
    (tmp_path / "runs/other").symlink_to(tmp_path / "outside")
    return RunFolder(tmp_path / "runs", ("a",))


def test_files_inside_are_read(folder):
    assert folder.read("config.yaml", limit=100) == b"verb: sft"
    assert folder.read("config.yaml", limit=4) == b"verb"
    assert folder.read("config.yaml", limit=3, from_end=True) == b"sft"


@pytest.mark.parametrize(
    "names",
    [
        ("link.txt",),
        ("logs", "run.log"),
        ("..", "..", "secret.txt"),
        ("../../secret.txt",),
        ("logs/run.log",),
        ("pipe",),
        (".",),
        ("",),
        ("config.yaml\0",),
        ("missing",),
    ],
)
def test_links_and_other_names_are_refused(folder, names):
    with pytest.raises(OSError):
        folder.open(*names)
    assert folder.read(*names, limit=100) == b""
    assert folder.stat(*names) is None


def test_a_directory_that_becomes_a_link_is_not_followed(folder, tmp_path):
    linked = RunFolder(folder.root, ("other",))
    assert linked.read("run.log", limit=100) == b""
    assert linked.entries() == ([], [])


def test_only_real_directories_and_files_are_listed(folder):
    assert folder.entries() == ([], ["config.yaml"])


def test_lines_are_whole_and_long_ones_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 7)
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 20)
    content = b"one\n" + b"x" * 50 + b"\n\n" + b"y" * 19 + b"\nincomplete"
    (tmp_path / "f").write_bytes(content)
    with (tmp_path / "f").open("rb") as file:
        found = list(complete_lines(file, 0))
        assert found == [(0, 4, b"one"), (4, 51, None), (55, 1, b""), (56, 20, b"y" * 19)]
        assert list(complete_lines(file, 55)) == found[2:]
