"""Checkpoints are verified by the processes that load them; a damaged one is passed over."""

import json

import pytest
import torch

from posttrain.checkpoints import checkpoint
from posttrain.checkpoints.tensor_files import save_tensors
from posttrain.cluster.placement import Placement
from posttrain.config.sections import ClusterConfig
from posttrain.core.errors import CheckpointError
from posttrain.train.verification import divide_by_size, find_checkpoint

TENSORS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def save(folder, step):
    def write(place):
        for number, name in enumerate(TENSORS):
            save_tensors(place / name, {"weight": torch.full((100,), step + number)})
        (place / "state.json").write_text(json.dumps({"step": step}))

    return checkpoint.write_checkpoint(folder, step, write)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.fixture
def read_here(monkeypatch):
    """The names of the files that this process reads."""
    names, original = [], checkpoint.file_sha256

    def recorded(path, **how):
        names.append(path.name)
        return original(path, **how)

    monkeypatch.setattr(checkpoint, "file_sha256", recorded)
    return names


def test_two_workers_read_the_tensors_and_find_what_is_damaged(tmp_path, read_here, caplog):
    first, second, third = (save(tmp_path, step) for step in (1, 2, 3))
    placement = Placement(ClusterConfig(devices=2, worker_timeout_seconds=200.0), tmp_path / "logs")
    read_here.clear()
    try:
        assert find_checkpoint(tmp_path, placement)[0] == third
        damage(third / TENSORS[2])
        damage(second / TENSORS[0])
        assert find_checkpoint(tmp_path, placement)[0] == first
        assert all(f"{path}: damaged" in caplog.text for path in (third / TENSORS[2], second / TENSORS[0]))
        damage(first / "state.json")
        with pytest.raises(CheckpointError, match="none of the 3 checkpoints can be used"):
            find_checkpoint(tmp_path, placement)
    finally:
        placement.close()
    assert set(read_here) == {"state.json"}, "the controller reads no weights"


def test_one_process_reads_everything_itself(tmp_path, read_here):
    newest = save(tmp_path, 1)
    placement = Placement(ClusterConfig(), tmp_path / "logs")
    read_here.clear()
    assert find_checkpoint(tmp_path, placement)[0] == newest
    assert sorted(read_here) == sorted([*TENSORS, "state.json"])
    damage(newest / TENSORS[1])
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        find_checkpoint(tmp_path, placement)


def test_shares_have_nearly_equal_sizes():
    files = {name: {"size": size, "sha256": ""} for name, size in zip("abcdef", (5, 9, 1, 4, 4, 1), strict=True)}
    shares = divide_by_size(files, 3)
    assert sorted(name for share in shares for name in share) == sorted(files)
    assert sorted(sum(entry["size"] for entry in share.values()) for share in shares) == [7, 8, 9]
    assert divide_by_size({}, 2) == [{}, {}]
