"""A row is one line, whoever reads it; lines that cannot be written are kept."""

import json
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.jsonl import LineFile, as_line, as_lines


@given(st.text())
def test_a_row_is_one_line_for_every_reader(text):
    line = as_line({"said": text})
    assert line.splitlines(keepends=True) == [line] and json.loads(line) == {"said": text}


def test_what_terminals_obey_is_written_out_and_letters_stay():
    assert as_lines([{"said": "a\x7f"}]).__next__() == '{"said": "a\\u007f"}\n'
    (line, other) = as_lines([{"said": "a\u2028b\u2029c\x85d\x9be\x7f"}, {"said": "\u00e9\u4f60"}])
    assert line.isascii() and line.isprintable() is False and line[:-1].isprintable()
    assert other == '{"said": "\u00e9\u4f60"}\n'


@pytest.fixture
def disk():
    """Sets the size that files may have: a write beyond it is partial or fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def allow(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield allow
    allow(None)


def test_lines_that_cannot_be_written_are_written_when_there_is_room(tmp_path, disk, caplog):
    file = LineFile(tmp_path / "metrics.jsonl")
    file.append("1\n")
    disk(6)
    file.append("two\nthree\n")
    file.append("4\n")
    assert file.path.read_text() == "1\ntwo\n"
    disk(8)
    file.append("5\n")
    assert file.path.read_text() == "1\ntwo\nth"
    disk(None)
    file.append("6\n")
    assert file.path.read_text() == "1\ntwo\nthree\n4\n5\n6\n"
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"{file.path}: cannot be written: File too large. The run goes on")
    assert second == f"{file.path}: can be written again; no line is lost"
    file.close()


def test_lines_that_are_kept_are_bounded(tmp_path, disk, caplog, monkeypatch):
    monkeypatch.setattr("posttrain.core.jsonl.KEPT_BYTES", 100)
    file = LineFile(tmp_path / "metrics.jsonl")
    disk(3)
    for number in range(100, 200):
        file.append(f"{number} {'x' * 15}\n")
        assert file.kept_bytes == sum(map(len, file.kept)) <= 120
    disk(None)
    file.append("end\n")
    numbers = [line.split()[0] for line in file.path.read_text().splitlines()]
    assert numbers == ["100", *(str(number) for number in range(196, 200)), "end"], "the line that was begun is whole"
    assert "95 lines are lost" in caplog.text
    disk(3)
    file.append("a\nb\n")
    file.close()
    assert "metrics.jsonl: 2 lines are missing" in caplog.text


def test_a_full_disk_is_a_warning_once(tmp_path, caplog):
    file = LineFile(Path("/dev/full"))
    for _ in range(3):
        file.append("x\n")
    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        "/dev/full: cannot be written: No space left on device"
    ]
