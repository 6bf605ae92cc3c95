"""The indexed format: the same bytes as Megatron's own writer, and nothing under its name that is not complete."""

import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError
from posttrain.data.preprocessing.indexed import DTYPES, HEADER, IndexedReader, IndexedWriter, token_dtype

DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [], [[], [65535]]]  # of sequences


def write(prefix, documents, dtype=np.uint16, with_modes=False):
    with IndexedWriter(prefix, dtype, with_modes) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(np.array(sequence, dtype=np.int64), mode=len(document))
            writer.end_document()
    return bytes_of(prefix)


def bytes_of(prefix):
    return [(prefix.parent / f"{prefix.name}.{end}").read_bytes() for end in ("bin", "idx")]


def megatron():
    """Megatron's own module. The test extra installs it (without what it depends on for training)."""
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def write_with_megatron(prefix, documents, dtype=np.uint16, with_modes=False):
    builder = megatron().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=with_modes)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64), mode=len(document))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return bytes_of(prefix)


def test_the_layout_byte_by_byte(tmp_path):
    data, index = write(tmp_path / "a", [[[7, 8]], [[9]]], np.int32)
    assert data == struct.pack("<iii", 7, 8, 9)
    assert index == b"MMIDIDX\x00\x00" + struct.pack("<QBQQ ii qq qqq", 1, 4, 2, 3, 2, 1, 0, 8, 0, 1, 2)


numbers = {
    np.uint8: st.integers(0, 2**8 - 1),
    np.int8: st.integers(-(2**7), 2**7 - 1),
    np.int16: st.integers(-(2**15), 2**15 - 1),
    np.int32: st.integers(-(2**31), 2**31 - 1),
    np.int64: st.integers(-(2**63), 2**63 - 1),
    np.uint16: st.integers(0, 2**16 - 1),
}


@st.composite
def files(draw):
    dtype = draw(st.sampled_from(list(numbers)))
    sequence = st.lists(numbers[dtype], max_size=8)
    return dtype, draw(st.lists(st.lists(sequence, max_size=3), max_size=6)), draw(st.booleans())


@settings(max_examples=60, deadline=None)
@given(files())
def test_megatron_writes_the_same_bytes_and_each_reads_the_other(tmp_path_factory, file):
    dtype, documents, with_modes = file
    folder = tmp_path_factory.mktemp("both")
    ours = write(folder / "ours", documents, dtype, with_modes)
    assert ours == write_with_megatron(folder / "theirs", documents, dtype, with_modes)
    sequences = [sequence for document in documents for sequence in document]
    read = IndexedReader(folder / "theirs")
    assert [list(sequence) for sequence in read] == sequences
    assert read.edges.tolist() == [0, *np.cumsum([len(document) for document in documents]).tolist()]
    modes = [len(document) for document in documents for _ in document]
    assert (None if read.modes is None else read.modes.tolist()) == ((modes or None) if with_modes else None)
    if any(sequences):  # theirs cannot map a file without bytes
        theirs = megatron().IndexedDataset(str(folder / "ours"), multimodal=with_modes)
        found = [theirs[i][0] if with_modes else theirs[i] for i in range(len(theirs))]
        assert [sequence.tolist() for sequence in found] == sequences


@settings(max_examples=40, deadline=None)
@given(files(), st.data())
def test_merging_parts_gives_the_bytes_of_writing_in_one_go(tmp_path_factory, file, data):
    dtype, documents, with_modes = file
    cut = data.draw(st.integers(0, len(documents)))
    folder = tmp_path_factory.mktemp("merge")
    write(folder / "first", documents[:cut], dtype, with_modes)
    write(folder / "second", documents[cut:], dtype, with_modes)
    whole = write(folder / "whole", documents, dtype, with_modes)
    with IndexedWriter(folder / "merged", dtype, with_modes) as writer:
        writer.add_index(folder / "first")
        writer.add_index(folder / "second")
    assert bytes_of(folder / "merged") == whole


def test_files_of_another_type_are_not_merged(tmp_path):
    write(tmp_path / "a", DOCUMENTS, np.int32)
    with pytest.raises(DataError, match=r"int32.*cannot be added to uint16"), IndexedWriter(tmp_path / "b", "u2") as b:
        b.add_index(tmp_path / "a")
    write(tmp_path / "c", DOCUMENTS, with_modes=True)
    with pytest.raises(DataError, match="with modes"), IndexedWriter(tmp_path / "b", np.uint16) as b:
        b.add_index(tmp_path / "c")


def test_many_at_once_as_one_by_one(tmp_path):
    none = np.array([], dtype=np.int64)
    one_by_one = write(tmp_path / "a", [[[1, 2]], [[3]], [[4, 5, 6], [7]], [], [[8]]], np.int32)
    with IndexedWriter(tmp_path / "b", np.int32) as writer:
        writer.add_all(np.array([1, 2, 3]), np.array([2, 1]), np.array([1, 1]))
        writer.add_all(none, none, none)
        writer.add_all(np.array([4, 5, 6, 7, 8]), np.array([3, 1, 1]), np.array([2, 0, 1]))
    assert bytes_of(tmp_path / "b") == one_by_one


def test_two_bytes_a_token_where_megatron_takes_two():
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32
    assert [megatron().DType.optimal_dtype(size) for size in (65499, 65500)] == [np.uint16, np.int32]
    assert {code: dtype.name for code, dtype in DTYPES.items()} == {d.value: d.name for d in megatron().DType}


@pytest.mark.parametrize(("dtype", "value"), [(np.uint16, -100), (np.uint16, 65536), (np.int32, 2**31)])
def test_what_does_not_fit_is_refused(tmp_path, dtype, value):
    with pytest.raises(ValueError, match=str(value)), IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add(np.array([1, value]))
    assert list(tmp_path.iterdir()) == []


def test_an_error_leaves_nothing_and_an_unfinished_file_has_no_name(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(tmp_path / "a", np.int32) as writer:
        writer.add([1])
        assert [file.name for file in tmp_path.iterdir()] == ["a.bin.unfinished"]
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_at_any_moment_of_finishing_leaves_the_old_the_new_or_nothing(tmp_path):
    """In a child that dies at its n-th call that changes the disk, until it no longer dies."""
    prefix = tmp_path / "a"
    old, new = [[[1, 1]]], [[[2]], [[3, 4]]]
    new_bytes = write(tmp_path / "new", new)
    seen = set()
    for moment in range(20):
        write(prefix, old)
        child = os.fork()
        if child == 0:
            die_at(moment)
            write(prefix, new)
            os._exit(0)
        ended_well = os.waitpid(child, 0)[1] == 0
        if (tmp_path / "a.idx").exists():
            found = [list(sequence) for sequence in IndexedReader(prefix)]
            assert found in ([[1, 1]], [[2], [3, 4]])
            seen.add(len(found))
        else:
            seen.add(0)
        if ended_well:
            break
    assert bytes_of(prefix) == new_bytes and seen == {0, 1, 2}


def die_at(moment):
    """From now on the process dies at the call of that number among those that change the disk."""
    calls = 0

    def counted(plain):
        def call(*arguments, **named):
            nonlocal calls
            if calls == moment:
                os._exit(9)
            calls += 1
            return plain(*arguments, **named)

        return call

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))


def damaged(index, change):
    raw = bytearray(index)
    change(raw)
    return bytes(raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.__delitem__(slice(20, None)), "not an index"),
        (lambda raw: raw.__setitem__(0, 0), "not an index"),
        (lambda raw: raw.__setitem__(9, 2), "version 2"),
        (lambda raw: raw.__setitem__(17, 9), "type code 9"),
        (lambda raw: raw.__setitem__(18, 200), "do not match 200 sequences"),
        (lambda raw: raw.__delitem__(slice(-1, None)), "is it truncated"),
        (lambda raw: raw.__setitem__(HEADER.size + 3, 0x80), "damaged"),
        (lambda raw: raw.__setitem__(HEADER.size + 4 * 5, 1), "damaged"),
        (lambda raw: raw.__setitem__(-1, 0x80), "damaged"),
        (lambda raw: raw.__setitem__(HEADER.size, 200), "is it truncated"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, change, message):
    _, index = write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.idx").write_bytes(damaged(index, change))
    with pytest.raises(DataError, match=message):
        IndexedReader(tmp_path / "a")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_damage_is_refused_or_harmless(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    _, index = write(folder / "a", DOCUMENTS)
    raw = bytearray(index)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    (folder / "a.idx").write_bytes(
        bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    )
    try:
        reader = IndexedReader(folder / "a")
    except DataError as error:
        assert str(folder) in str(error)
    else:
        assert all(len(reader[i]) == reader.lengths[i] for i in range(len(reader)))


def test_a_missing_or_short_bin_is_refused(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    (tmp_path / "a.bin").write_bytes((tmp_path / "a.bin").read_bytes()[:-1])
    with pytest.raises(DataError, match=r"13 bytes, but.*needs 14"):
        IndexedReader(tmp_path / "a")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match=r"a\.bin: cannot be read: No such file"):
        IndexedReader(tmp_path / "a")
