"""Memory use does not grow with the size of a group of tensors, and equal bytes are not hashed twice."""

import hashlib
import json

import pytest
import torch

from posttrain.convert import conversion, stream
from posttrain.convert.files import BufferPool
from posttrain.convert.megatron import CheckpointLayout
from tests.unit.convert.models import assert_equal, converted, weights


class Watched(BufferPool):
    """Counts the bytes in use at a time, small buffers included; reuses no buffer."""

    most = 0

    def __init__(self, limit):
        super().__init__(limit)
        self.lent = {}

    def take(self, size):
        buffer = torch.empty(size, dtype=torch.uint8)
        self.lent[buffer.untyped_storage()._cdata] = size
        Watched.most = max(Watched.most, sum(self.lent.values()))
        return buffer

    def give_back(self, tensor):
        del self.lent[tensor.untyped_storage()._cdata]


@pytest.mark.parametrize(("tp", "experts"), [(2, "grouped"), (1, "grouped"), (2, "single")])
def test_a_worker_holds_at_most_twice_the_largest_tensor(tp, experts, tiny, tmp_path, monkeypatch):
    """Four experts over two tensor ranks in one matrix each: sources and targets together are far more."""
    monkeypatch.setattr(stream, "MIN_BATCH_BYTES", 0)
    monkeypatch.setattr(stream, "BufferPool", Watched)
    layout = CheckpointLayout("mcore", tp=tp, experts=experts)
    for source, out, target in ((tiny("mixtral"), "core", layout), (tmp_path / "core", "back", CheckpointLayout())):
        Watched.most = 0
        converted(source, tmp_path / out, target, "hf" if out == "core" else "mcore")
        manifest = json.loads((tmp_path / out / "convert.json").read_text())
        rows = manifest["source"] + manifest["target"]
        largest = max(4 * torch.Size(row["shape"]).numel() for row in rows)
        assert 0 < Watched.most <= 2 * largest
    assert_equal(tiny("mixtral"), tmp_path / "back")


def test_bytes_that_do_not_change_are_hashed_once(tiny, tmp_path, monkeypatch):
    hashed = []

    def counting(data):
        hashed.append(data.nbytes)
        return hashlib.sha256(data)

    fake = type("hashlib", (), {"sha256": staticmethod(counting)})
    monkeypatch.setattr(stream, "hashlib", fake)
    monkeypatch.setattr(conversion, "hashlib", fake)
    converted(tiny("llama"), tmp_path / "copy", CheckpointLayout())
    assert sum(hashed) == sum(tensor.nbytes for tensor in weights(tiny("llama")).values())
    manifest = json.loads((tmp_path / "copy/convert.json").read_text())
    for row in manifest["target"]:
        tensor = weights(tmp_path / "copy")[row["name"]]
        assert row["sha256"] == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def test_buffers_are_used_again_and_not_hoarded():
    buffers = BufferPool(limit=5 << 20)
    first = buffers.take(2 << 20)
    address = first.data_ptr()
    buffers.give_back(first.view(torch.float32).view(512, -1))
    assert buffers.take((2 << 20) - 4096).data_ptr() == address
    for buffer in [buffers.take(2 << 20) for _ in range(4)]:
        buffers.give_back(buffer)
    assert sum(buffer.numel() for buffer in buffers.free) <= 5 << 20
