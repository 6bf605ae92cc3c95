"""The store: rows come back as they were put in, from memory and from disk; samples are made anew or held."""

import numpy as np
import pytest

from posttrain.core.types import Sample
from posttrain.data.store import ExampleStore, ExampleStoreBuilder


def sample(length, seed=0, targets=False, **fields):
    rng = np.random.default_rng([length, seed])
    mask = rng.random(length) > 0.5
    mask[0] = False
    return Sample(
        tokens=rng.integers(0, 1000, length).astype(np.int32),
        mask=mask,
        targets=rng.random(length).astype(np.float32) if targets else None,
        **fields,
    )


def rows_of(count, targets=False):
    return [
        [
            sample(2 + n % 7, s, targets, label=float(s), margin=n / 3, origin=f"file-{n % 2}.jsonl:{n + 1}")
            for s in (0, 1)
        ]
        for n in range(count)
    ]


def stored(rows, **options):
    builder = ExampleStoreBuilder(**options)
    for row in rows:
        builder.add(row)
    return builder.finish()


def same(one, other):
    assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.mask, other.mask)
    assert (one.label, one.margin, one.origin) == (other.label, other.margin, other.origin)
    assert (one.targets is None) == (other.targets is None)
    assert one.targets is None or np.array_equal(one.targets, other.targets)


@pytest.mark.parametrize("targets", [False, True])
@pytest.mark.parametrize("limit", [10**9, 200, 0])
def test_rows_come_back_from_memory_and_from_disk(tmp_path, limit, targets):
    rows = rows_of(50, targets)
    store = stored(rows, folder=tmp_path, limit=limit)
    assert isinstance(store.columns.tokens, np.memmap) == (limit < 10**9)
    assert list(tmp_path.iterdir()) == []  # the file has no name: a kill leaves nothing behind
    assert len(store) == 50
    for number, (row, back) in enumerate(zip(rows, store, strict=True)):
        for one, other in zip(row, back, strict=True):
            same(one, other)
            assert other.group == number and other.tokens.dtype == np.int32
    assert store.fingerprint() == ExampleStore.of(rows).fingerprint()
    lengths = [len(s) for row in rows for s in row]
    assert store.lengths().tolist() == lengths and store.counted() == sum(int(s.mask.sum()) for r in rows for s in r)


def test_indices_slices_and_ends():
    store = ExampleStore.of(rows_of(5))
    assert store[-1][0].origin == "file-0.jsonl:5" and [row[0].group for row in store[1:4]] == [1, 2, 3]
    assert len(store[3:99]) == 2 and store[5:] == []
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            store[wrong]


@pytest.mark.parametrize("origin", ["a:1", "a:row 7", "a", "", "a:007", "12", "a:99999999999999999999"])
def test_origins_come_back(origin):
    assert ExampleStore.of([[sample(3, origin=origin)]])[0][0].origin == origin


def test_a_subset_is_rows_in_another_order():
    rows = rows_of(10)
    store = ExampleStore.of(rows)
    part = store.subset([7, 2, 2]).subset([2, 0])
    assert [row[0].origin for row in part] == ["file-0.jsonl:3", "file-1.jsonl:8"] and [r[0].group for r in part] == [
        0,
        1,
    ]
    assert part.fingerprint() == ExampleStore.of([rows[2], rows[7]]).fingerprint() != store.fingerprint()
    assert part.lengths().tolist() == [len(s) for number in (2, 7) for s in rows[number]]
    assert part.counted() == sum(int(s.mask.sum()) for number in (2, 7) for s in rows[number])


def test_samples_are_made_anew_unless_they_are_held():
    store = ExampleStore.of(rows_of(3))
    store[1][0].ref_logprobs = np.zeros(3, dtype=np.float32)
    assert store[1][0].ref_logprobs is None
    store.hold()
    store[1][0].ref_logprobs = np.zeros(3, dtype=np.float32)
    store.hold()  # again changes nothing
    assert store[1][0].ref_logprobs is not None and store[1:2][0][0] is store[1][0]
    assert store.subset([1])[0][0].ref_logprobs is None


def test_tokens_cannot_be_changed_by_accident(tmp_path):
    for limit in (10**9, 0):
        row = stored(rows_of(1), folder=tmp_path, limit=limit)[0]
        with pytest.raises(ValueError, match="read-only"):
            row[0].tokens[0] = 1
