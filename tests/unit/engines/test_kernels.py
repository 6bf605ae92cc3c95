"""Random numbers, sampling and attention kernels against slow, obvious code."""

import numpy as np
import pytest
import torch

from posttrain.core import ops
from posttrain.engines.kernels.reference import (
    BLOCK,
    ROWS_PER_BLOCK,
    EmbeddingBagAttention,
    attend,
    draw,
    row_blocks,
    uniforms,
)


def splitmix(seed, place):
    mask = 2**64 - 1
    x = (seed * 0x9E3779B97F4A7C15 + place) & mask
    for _ in range(2):
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
    return (x >> 11) * 2.0**-53


def test_random_numbers_equal_the_published_generator():
    seeds, places = [0, 1, 7, -3, 2**62, -(2**63)], [0, 1, 2, 500, 3, 4]
    expected = [splitmix(seed, place) for seed, place in zip(seeds, places, strict=True)]
    assert uniforms(torch.tensor(seeds), torch.tensor(places)).tolist() == expected


def test_random_numbers_are_even_and_independent():
    zeros, count = torch.zeros(1000, dtype=torch.long), torch.arange(1000)
    for numbers in (uniforms(count, zeros).numpy(), uniforms(zeros + 7, count).numpy()):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert np.histogram(numbers, 10, (0, 1))[0].min() > 65
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1


@pytest.mark.parametrize("size", [1, 3, 8, 24])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 3), (1, 1), (4, 1)])
def test_attention_of_a_step_is_the_formula_row_by_row(kv_heads, group, window, size):
    generator = torch.Generator().manual_seed(0)
    rows, capacity, width, value_width = 2 * ROWS_PER_BLOCK + 3, 24, 8, 4
    blocks = rows * capacity // size + 1
    keys = torch.randn(blocks, kv_heads, size, width, generator=generator).transpose(1, 2)
    values = torch.randn(blocks, kv_heads, size, value_width, generator=generator).transpose(1, 2)
    table = (torch.randperm(blocks - 1, generator=generator) + 1).view(rows, -1).int()
    query = torch.randn(rows, kv_heads * group, width, generator=generator)
    positions = torch.randint(0, capacity - 1, (rows,), generator=generator)
    longest = int(positions.max()) + 1
    row_blocks_of_step = row_blocks(positions, longest, window, query.dtype)
    bags = EmbeddingBagAttention(row_blocks_of_step, kv_heads * group, values, table)
    by_position = [stream.contiguous() for stream in (keys, values)]  # the layout of every other device
    found = [attend(query, *both, table, positions, longest, None, window) for both in ((keys, values), by_position)]
    found.append(bags.attend(query, keys, values, None))
    for row, last in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, last + 1 - window)
        k, v = (stream[table[row].long()].flatten(0, 1)[first : last + 1] for stream in (keys, values))
        for head in range(kv_heads * group):
            own = (k[:, head // group] @ query[row, head] * width**-0.5).softmax(0) @ v[:, head // group]
            assert all((each[row, head] - own).abs().max() < 1e-6 for each in found)


def test_the_sampled_token_is_where_the_cumulative_probability_passes_the_random_number():
    rows, vocabulary = 200, 2 * BLOCK + 37  # several blocks, the last one not full
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 4
    seeds, places = torch.arange(rows), torch.arange(rows) * 3
    for temperature, floor in ((1.0, None), (0.7, None), (1.0, 4.0), (2.0, 3.0)):
        least = None if floor is None else torch.full((rows, 1), floor)
        z = logits.double() / temperature
        if least is not None:
            z = z.masked_fill(z < least, -torch.inf)
        cumulative = z.softmax(-1).cumsum(-1)
        tokens, logprobs = draw(logits, temperature, least, seeds, places)
        wanted = uniforms(seeds, places)
        upper = cumulative.gather(1, tokens[:, None])[:, 0]
        lower = upper - z.softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert ((lower - 1e-6 <= wanted) & (wanted <= upper + 1e-6)).all()
        expected = z.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert (logprobs - expected).abs().max() < 1e-5


def test_impossible_tokens_are_never_sampled():
    logits = torch.full((4096, 3 * BLOCK), -torch.inf)
    logits[:, [1, 2 * BLOCK + 5]] = 0.5
    tokens, logprobs = draw(logits, 1.0, None, torch.arange(4096), torch.zeros(4096, dtype=torch.long))
    assert set(tokens.tolist()) == {1, 2 * BLOCK + 5}
    assert abs((tokens == 1).float().mean() - 0.5) < 0.05
    assert (logprobs - np.log(0.5)).abs().max() < 1e-6


@pytest.mark.parametrize("spread", [0.1, 2.0, 8.0])  # flat: most tokens are needed to reach top_p; steep: a handful
@pytest.mark.parametrize("settings", [(0, 0.9, 0.0), (50, 0.9, 0.01), (3, 1.0, 0.0), (0, 0.5, 0.2)], ids=str)
def test_truncation_of_a_large_vocabulary(settings, spread):
    top_k, top_p, min_p = settings
    logits = (torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)) * spread).bfloat16().float()  # with ties
    for row, kept in zip(logits.double(), ops.tempered(logits, 1.0, top_k, top_p, min_p).isfinite(), strict=True):
        values = row.sort(descending=True).values[: top_k or None]
        chances, expected, mass = values.softmax(-1), set(), 0.0
        for value in sorted(set(values.tolist()), reverse=True):  # equally likely tokens stay or go together
            if expected and (mass >= top_p or value < float(values[0]) + np.log(min_p or 1e-300)):
                break
            expected |= set((row == value).nonzero()[:, 0].tolist())
            mass += float(chances[values == value].sum())
        differing = set(kept.nonzero()[:, 0].tolist()) ^ expected
        assert not differing or abs(mass - top_p) < 1e-5
