import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.data.pack import collate, pack
from posttrain.types import Sample


def sample(length, start=0, **extra):
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Sample(tokens=tokens, mask=np.arange(length) > 0, **extra)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60), st.integers(1, 2))
def test_every_sample_is_packed_once_within_the_budget(lengths, budget, group_size):
    lengths = lengths[: len(lengths) // group_size * group_size] or [3] * group_size
    samples = [sample(n) for n in lengths]
    packs = pack(samples, budget, group_size)
    assert sorted(i for members in packs for i in members) == list(range(len(samples)))
    for members in packs:
        assert sum(lengths[i] for i in members) <= budget or len(members) == group_size
        for first in range(0, len(members), group_size):
            row = members[first : first + group_size]
            assert row == list(range(row[0], row[0] + group_size)) and row[0] % group_size == 0


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(10, 500, 300)
    packs = pack([sample(int(n)) for n in lengths], 2048)
    assert len(packs) <= -(-lengths.sum() // 2048) + 1


def test_collate_lays_samples_end_to_end():
    first = sample(3, start=10, label=1.0, advantages=np.array([0, 1, 2], dtype=np.float32))
    second = sample(2, start=20, margin=0.5, advantages=np.array([0, 5], dtype=np.float32), reward=2.0)
    batch = collate([first, second])
    assert batch.tokens.tolist() == [10, 11, 12, 20, 21]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.sample_of.tolist() == [0, 0, 0, 1, 1]
    assert batch.starts.tolist() == [0, 3, 5]
    assert batch.mask.tolist() == [False, True, True, False, True]
    assert batch.counted.tolist() == [1, 2, 4]
    assert batch.advantages.tolist() == [0, 1, 2, 0, 5]
    assert batch.label.tolist() == [1, 0] and batch.margin.tolist() == [0, 0.5] and batch.reward.tolist() == [0, 2]
    assert batch.per_sample(batch.advantages).tolist() == [3, 5]
    assert batch.counts().tolist() == [2, 1]


def test_a_stream_that_one_sample_lacks_is_left_out():
    full = sample(3, ref_logprobs=np.zeros(3, dtype=np.float32))
    assert collate([full]).ref_logprobs is not None
    assert collate([full, sample(3)]).ref_logprobs is None


def test_samples_check_their_streams():
    with pytest.raises(ValueError, match=r"a\.jsonl:3: ref_logprobs"):
        sample(3, ref_logprobs=np.zeros(2, dtype=np.float32), origin="a.jsonl:3")
    with pytest.raises(ValueError, match="first token"):
        Sample(tokens=np.arange(3, dtype=np.int32), mask=np.ones(3, dtype=np.bool_))
    with pytest.raises(ValueError, match="mask"):
        Sample(tokens=np.arange(3, dtype=np.int32), mask=np.zeros(3, dtype=np.int64))
