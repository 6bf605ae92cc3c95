"""Files: a write that fails leaves the old content; what cannot be read is named."""

import os

import pytest

from posttrain.core.disk import DiskFullError
from posttrain.core.errors import CheckpointError
from posttrain.core.files import atomic_write, atomic_write_json, atomic_write_text, read_json, write_json


def test_a_write_that_fails_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    atomic_write_text(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="No space"):
        atomic_write_text(path, "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]
    assert path.read_text() == "old"


def test_json_objects_come_back(tmp_path):
    value = {"step": 3, "text": "caf\u00e9 \ud800", "list": [1.5, None]}
    for write in (write_json, atomic_write_json):
        write(tmp_path / "state.json", value)
        assert read_json(tmp_path / "state.json") == value


def test_a_lone_surrogate_is_written_as_an_escape(tmp_path):
    atomic_write(tmp_path / "a.jsonl", ['{"text": "', "\ud800", '"}'])
    assert read_json(tmp_path / "a.jsonl") == {"text": "\ud800"}


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_damaged_json_file_is_named(tmp_path, content):
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json: damaged"):
        read_json(tmp_path / "state.json")
    with pytest.raises(CheckpointError, match=r"missing\.json: cannot be read: No such file"):
        read_json(tmp_path / "missing.json")
