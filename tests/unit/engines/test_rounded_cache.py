"""A KV cache of 8-bit floats: what is stored, that every pass attends to it, its memory, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from posttrain.core.errors import UsageError
from posttrain.engines.base import EngineSpec, GenerationRequest, Sampling
from posttrain.engines.kv_cache import bytes_per_position
from posttrain.engines.local import LocalEngine
from posttrain.nn.kernels import reference
from tests.tiny import tiny_model
from tests.unit.engines.test_local import AsOnAGPU
from tests.unit.engines.test_paging import STOPS, all_free, engine_for, equal, requests_of, shorten_parts

FP8 = {"kv_cache_dtype": "fp8"}
MODEL = tiny_model("llama").double()  # float rounding then decides about no 8-bit float


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(-60, 60))
def test_vectors_are_rounded_to_three_bits_and_a_power_of_two(seed, dtype, magnitude):
    x = (torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude).to(dtype)
    x[0, 0] = 0
    rounded, exponents = reference.round_vectors(x)
    assert rounded.dtype == torch.float8_e4m3fn and rounded.shape == x.shape and exponents.shape == (7, 3)
    found = reference.restore_vectors(rounded, exponents, torch.float32)
    largest = x.float().abs().amax(-1, keepdim=True)
    assert ((found - x.float()).abs() <= (x.float().abs() / 16).clamp(min=largest * 2.0**-18)).all()
    assert (rounded.float().abs().amax(-1)[largest[..., 0] > 0] > 208).all(), "no smaller power of two would do"
    assert torch.equal(reference.restore_vectors(rounded, exponents, torch.bfloat16).float(), found)
    again = reference.restore_vectors(*reference.round_vectors(found), torch.float32)
    assert torch.equal(again, found) and not found[0, 0].any()


def test_the_largest_8_bit_float_is_not_exceeded():
    edges = torch.tensor([448.0, 448.1, 449.0, 895.0, 896.0, 896.1, 1.75, 1.7500001])[:, None]
    rounded, exponents = reference.round_vectors(edges)
    assert exponents.tolist() == [0, 1, 1, 1, 1, 2, -8, -7] and rounded.float().abs().max() == 448


def attend_to_rounded(module, query, key, value, *args, **kwargs):
    """The stock attention, to keys and values as an 8-bit cache would hold them."""
    streams = [reference.restore_vectors(*reference.round_vectors(stream), stream.dtype) for stream in (key, value)]
    return sdpa_attention_forward(module, query, *streams, *args, **kwargs)


AttentionInterface.register("rounded_for_this_test", attend_to_rounded)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("kind", [LocalEngine, AsOnAGPU])
def test_completions_are_those_of_the_stock_model_with_rounded_keys_and_values(name, kind):
    model, sampling = tiny_model(name).double(), Sampling(max_tokens=20, stop_ids=STOPS)
    samples = engine_for(model, kind, slots=4, block_size=16, **FP8).generate(requests_of((9, 21, 1, 30), 2), sampling)
    model.set_attn_implementation("rounded_for_this_test")
    exactly = tiny_model(name).double()
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()[None]
        with torch.no_grad():
            expected, unrounded = (one(tokens).logits[0, :-1].log_softmax(-1) for one in (model, exactly))
        of_tokens = tokens[0, 1:, None]
        own, mask = torch.from_numpy(sample.logprobs[1:]), torch.from_numpy(sample.mask[1:])
        assert (own - expected.gather(1, of_tokens)[:, 0])[mask].abs().max() < 1e-5
        assert (own - unrounded.gather(1, of_tokens)[:, 0])[mask].abs().max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_blocks_give_the_same_bits(name, dtype):
    model, sampling = tiny_model(name).to(dtype), Sampling(max_tokens=12, stop_ids=STOPS)
    requests = requests_of((9, 21, 1, 30), group=3)
    expected = engine_for(model, slots=5, block_size=64, **FP8).generate(requests, sampling)
    for size in (4, 16):
        equal(engine_for(model, slots=5, block_size=size, **FP8).generate(requests, sampling), expected)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_memory_parts_prefixes_and_drafts_change_nothing(data):
    """Recomputed, shared, found in the cache or drafted: the same 8-bit floats, so the same completions."""
    draw = data.draw
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    requests = reusing(requests_of(lengths, group=draw(st.integers(1, 3)), seed=draw(st.integers(0, 3))))
    sampling = Sampling(max_tokens=draw(st.integers(1, 30)), stop_ids=draw(st.sampled_from([(), STOPS])))
    expected = engine_for(MODEL, slots=8, **FP8).generate(requests, sampling)
    size = draw(st.sampled_from([1, 3, 16]))
    longest = -(-(30 + sampling.max_tokens) // size)
    how = {
        "slots": draw(st.integers(1, 8)),
        "block_size": size,
        "cache_blocks": draw(st.integers(longest, 3 * longest)),
    }
    how["speculative_tokens"] = draw(st.sampled_from([0, 3]))
    engine = engine_for(MODEL, draw(st.sampled_from([LocalEngine, AsOnAGPU])), frozen=True, **how, **FP8)
    with pytest.MonkeyPatch.context() as patch:
        shorten_parts(patch, draw(st.sampled_from([7, 1024])))
        for _ in range(2):  # the second time with the prefixes of the first
            equal(engine.generate(requests, sampling), expected, 1e-6)
    assert all_free(engine)


def reusing(requests):
    return [replace(request, reuse_prefix=True) for request in requests]


def test_a_later_turn_finds_the_earlier_one():
    engine = engine_for(MODEL, slots=4, block_size=4, frozen=True, **FP8)
    first, _ = (engine.generate(reusing(requests_of((17,))), Sampling(max_tokens=9))[0] for _ in range(2))
    longer = GenerationRequest(prompt=np.append(first.tokens, np.int32(9)), seed=3, reuse_prefix=True)
    (found,) = engine.generate([longer], Sampling(max_tokens=9))
    assert found.reused > 0.5
    equal([found], engine_for(MODEL, **FP8).generate([longer], Sampling(max_tokens=9)), 1e-6)


def test_memory_is_counted():
    engine = engine_for(tiny_model("llama").bfloat16(), slots=3, block_size=16, frozen=True, **FP8)
    engine.generate(requests_of((9,)), Sampling(max_tokens=4))
    cache, config = engine.executor.cache, engine.runner.model.config
    streams = [*cache.layers.values(), *cache.exponents.values()]
    positions = (cache.pool.count + 1) * cache.block_size
    assert sum(tensor.nbytes for pair in streams for tensor in pair) == positions * engine.bytes_per_position
    exact = bytes_per_position(config, torch.bfloat16, latents=False)
    heads = 2 * config.num_hidden_layers * config.num_key_value_heads
    assert engine.bytes_per_position == bytes_per_position(config, torch.bfloat16, latents=False, rounded=True)
    assert engine.bytes_per_position - heads == exact / 2


def test_what_cannot_be_rounded_is_refused():
    with pytest.raises(UsageError, match="holds latents"):
        engine_for(tiny_model("deepseek_v3"), **FP8)
    assert EngineSpec(kv_cache_dtype="fp8").local_options["kv_cache_dtype"] == "fp8"
