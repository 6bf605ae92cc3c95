"""Mixing by weight: shares, epochs, and a position that resumes for any number of workers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.core.types import Sample
from posttrain.data.dataset import ExampleStream
from posttrain.data.reading.mixture import Mixture
from posttrain.train.learner_group import LearnerGroup


def test_the_first_to_run_out_ends_the_epoch():
    mixture = Mixture((100, 1000), (0.5, 0.5))
    assert mixture.counts == (100, 100) and mixture.examples == 200
    assert Mixture((100, 1000), (1, 4)).counts == (100, 400)
    assert Mixture((1000, 10), (0.9, 0.1)).counts == (90, 10)


def test_with_repeat_the_others_start_again():
    assert Mixture((100, 1000), (0.5, 0.5), repeat=True).counts == (1000, 1000)
    assert Mixture((100, 1000), (1, 4), repeat=True).counts == (250, 1000)


def test_an_epoch_without_end_is_refused():
    with pytest.raises(UsageError, match="an epoch would have"):
        _ = Mixture((10**6, 10), (1e-6, 1.0), repeat=True).examples


sources = st.lists(st.tuples(st.integers(1, 30), st.floats(0.1, 5)), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(sources, st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_every_source_goes_round_by_itself(drawn, repeat, shuffle, seed):
    sizes, weights = zip(*drawn, strict=True)
    mixture = Mixture(sizes, weights, repeat)
    edges = np.cumsum((0, *sizes))
    epochs = [mixture.order(epoch, seed, shuffle) for epoch in range(4)]
    for order in epochs:
        source = np.searchsorted(edges, order, side="right") - 1
        assert tuple(np.bincount(source, minlength=len(sizes))) == mixture.counts
    stream = np.concatenate(epochs)
    for number, size in enumerate(sizes):
        taken = [index - edges[number] for index in stream if edges[number] <= index < edges[number + 1]]
        for start in range(0, len(taken) - size + 1, size):  # all rows of it before any comes again
            assert sorted(taken[start : start + size]) == list(range(size))
        if not shuffle:
            assert taken == [place % size for place in range(len(taken))]
    largest = max(size / weight for size, weight in drawn) if repeat else min(size / weight for size, weight in drawn)
    assert any(
        size / weight == largest and count == size
        for size, weight, count in zip(sizes, weights, mixture.counts, strict=True)
    )


def test_epochs_and_seeds_are_interleaved_differently():
    mixture = Mixture((50, 50), (1, 1))
    turns = [tuple(mixture.order(epoch, seed, False) < 50) for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    assert len(set(turns)) == 3
    assert np.array_equal(mixture.order(3, 7, True), mixture.order(3, 7, True))


def stream(batch_size, mixture=None, rows=30):
    samples = [[Sample(tokens=np.array([n, 0], dtype=np.int32), mask=np.array([False, True]))] for n in range(rows)]
    return ExampleStream(samples, batch_size, seed=3, mixture=mixture)


def numbers(samples):
    return [int(sample.tokens[0]) for sample in samples]


class Ranks:
    def __init__(self, size):
        self.size = size


@pytest.mark.parametrize("mixture", [None, Mixture((10, 20), (0.6, 0.4)), Mixture((10, 20), (0.6, 0.4), repeat=True)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_position_resumes_at_the_exact_row_for_any_number_of_workers(mixture, world):
    """Saved by one worker at any step, resumed by `world`: together these see the rows that the one would have seen."""
    alone = stream(7, mixture)
    steps, positions = [], []
    for _ in range(15):  # over the edges of epochs
        positions.append(alone.position)
        steps.append(numbers(alone.take()))
    group = LearnerGroup(Ranks(world))
    for first in (0, 4, 9):
        resumed = stream(7, mixture)
        resumed.position = positions[first]
        for step in range(first, 15):
            shards = group.shards(resumed.take())
            assert len(shards) == world and max(map(len, shards)) - min(map(len, shards)) <= 1
            assert [n for shard in shards for n in numbers(shard)] == steps[step]


def test_the_stream_knows_the_length_of_its_epoch():
    mixture = Mixture((10, 20), (0.5, 0.5))
    mixed = stream(5, mixture)
    assert mixed.examples_per_epoch == 20 and stream(5).examples_per_epoch == 30
    epochs = [numbers(mixed.take(20)) for _ in range(2)]
    assert all(sorted(n for n in epoch if n < 10) == list(range(10)) for epoch in epochs)
    assert sorted(n for epoch in epochs for n in epoch if n >= 10) == list(range(10, 30))
