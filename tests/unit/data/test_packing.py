from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.types import Sample
from posttrain.data.packing import collate, find_prefix_groups, move_batch, pack_into_micro_batches


def sample(length, start=0, **extra):
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Sample(tokens=tokens, mask=np.arange(length) > 0, **extra)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 60), st.integers(1, 2))
def test_every_sample_is_packed_once_within_the_budget(lengths, budget, group_size):
    lengths = lengths[: len(lengths) // group_size * group_size] or [3] * group_size
    samples = [sample(n) for n in lengths]
    micro_batches = pack_into_micro_batches(samples, budget, group_size)
    assert sorted(i for members in micro_batches for i in members) == list(range(len(samples)))
    for members in micro_batches:
        assert sum(lengths[i] for i in members) <= budget or len(members) == group_size
        for first in range(0, len(members), group_size):
            row = members[first : first + group_size]
            assert row == list(range(row[0], row[0] + group_size)) and row[0] % group_size == 0


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(10, 500, 300)
    micro_batches = pack_into_micro_batches([sample(int(n)) for n in lengths], 2048)
    assert len(micro_batches) <= -(-lengths.sum() // 2048) + 1


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


def with_prefix(prompt, *completions):
    """Samples that begin with the same tokens."""
    return [
        Sample(
            tokens=np.array([*prompt, *completion], dtype=np.int32), mask=np.arange(len(prompt) + len(completion)) > 0
        )
        for completion in completions
    ]


def test_a_common_prefix_is_laid_out_once():
    samples = [*with_prefix([1, 2, 3], [4, 5], [6], []), sample(2, start=20)]
    plain, batch = collate(samples), collate(samples, min_shared_prefix=3)
    shared = batch.sharing
    assert shared.tokens.tolist() == [1, 2, 3, 4, 5, 6, 20, 21] and shared.lengths == (3, 2, 1, 2)
    assert shared.positions.tolist() == [0, 1, 2, 3, 4, 3, 0, 1] and shared.starts.tolist() == [0, 3, 5, 6, 8]
    assert shared.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7] and shared.key_lengths == (3, 5, 4, 2)
    assert shared.key_starts.tolist() == [0, 3, 8, 12, 14]
    assert shared.tokens[shared.place].tolist() == batch.tokens.tolist() == plain.tokens.tolist()
    assert shared.positions[shared.place].tolist() == batch.positions.tolist() == plain.positions.tolist()
    assert batch.computed(batch.counted - 1).tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 6]
    assert plain.sharing is None and plain.computed(plain.counted) is plain.counted
    assert collate(samples, min_shared_prefix=4).sharing is None  # too short to be shared


def test_all_tensors_of_a_batch_are_moved_together():
    streams = {"advantages": np.array([0, 1, 2.5, 0, 0], dtype=np.float32), "label": 1.0, "reward": 3.0}
    samples = [replace(each, **streams) for each in with_prefix([1, 2, 3], [4, 5], [6, 7])]
    for share in (0, 3):
        stayed, went = (
            collate(samples, min_shared_prefix=share),
            move_batch(collate(samples, min_shared_prefix=share), "cpu"),
        )
        for here, there in ((stayed, went), (stayed.sharing, went.sharing))[: 2 if share else 1]:
            for field in fields(here):
                one, other = getattr(here, field.name), getattr(there, field.name)
                if isinstance(one, torch.Tensor):
                    assert one.dtype == other.dtype and one.tolist() == other.tolist(), field.name
                elif field.name != "sharing":
                    assert one == other, field.name


def test_a_prefix_that_saves_little_is_not_shared():
    long, short = ([[first] * 200 for first in (50, 60)], [[first] * 10 for first in (50, 60)])
    assert find_prefix_groups(with_prefix(range(20), *long), 16) == [(0, 1, 0), (1, 2, 0)]
    assert find_prefix_groups(with_prefix(range(20), *short), 16) == [(0, 2, 20)]


def test_prefix_groups_save_the_most_tokens():
    system, first, second = [*range(20)], [*range(100, 140)], [*range(200, 240)]
    samples = with_prefix(system, [*first, 1], [*first, 2], [*second, 1], [*second, 2], [*second, 3])
    assert find_prefix_groups(samples, 16) == [(0, 2, 60), (2, 5, 60)]  # not all five for the sake of the first twenty
    lone = with_prefix(system, [7], [8], [9])
    assert find_prefix_groups(lone, 16) == [(0, 3, 20)]
    assert [group[:2] for group in find_prefix_groups(with_prefix(system, *([n] for n in range(40))), 16)] in (
        [(0, 16), (16, 32), (32, 40)],
        [(0, 8), (8, 24), (24, 40)],
    )


def test_a_shared_prefix_counts_once_and_a_group_is_split_where_a_micro_batch_is_full():
    samples = with_prefix(range(20), *([n] * 10 for n in range(50, 58)))  # 30 tokens each
    assert pack_into_micro_batches(samples, 100, min_shared_prefix=16) == [list(range(8))]
    assert pack_into_micro_batches(samples, 60, min_shared_prefix=16) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(pack_into_micro_batches(samples, 60)) == 4
    assert pack_into_micro_batches(samples, 40, 2, min_shared_prefix=16) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert pack_into_micro_batches(samples, 1, min_shared_prefix=16) == [[n] for n in range(8)]


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
