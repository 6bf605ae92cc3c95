"""The paged KV cache: against a cache of one row per slot, with too little memory, with long prompts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import PosttrainError
from posttrain.core.host import peak_memory_gib
from posttrain.engines import local, scheduler
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.block_pool import UNUSED_BLOCK, BlockPool, block_hashes
from posttrain.engines.decoder import FusedDecoder, LatentAttention
from posttrain.engines.local import LocalEngine
from posttrain.models.adapters import add_adapters
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner
from posttrain.nn.layers import supports_fused_layers
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.engines.test_local import AsOnAGPU

STOPS = (8, 9, 10)


def engine_for(model, kind=LocalEngine, **options):
    model.set_attn_implementation(attention.NAME)
    return kind(ModelRunner.from_model(model.eval()), tiny_tokenizer(), **options)


def requests_of(lengths, group=1, seed=0):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(8, 60, n).astype(np.int32) for n in lengths]
    return [
        GenerationRequest(prompt=prompt, group=i, seed=i * group + k)
        for i, prompt in enumerate(prompts)
        for k in range(group)
    ]


def equal(found, expected, tolerance=0.0):
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish
        assert np.abs(a.logprobs - b.logprobs).max() <= tolerance


def all_free(engine_or_session):
    executor = getattr(engine_or_session, "executor", engine_or_session)
    pool = executor.cache.pool
    return pool.available == pool.count and not any(pool.references) and (executor.cache.host_table == 0).all()


def shorten_parts(monkeypatch, tokens):
    """Make every scheduler compute prompts in parts of so few tokens; returns a list that collects their beginnings."""
    begun = []
    build, prefill = scheduler.BatchScheduler.__init__, scheduler.ModelExecutor.prefill

    def shortened(self, *args, **kwargs):
        build(self, *args, **kwargs)
        self.part_tokens = tokens

    def noted(self, parts):
        begun.extend(part.begin for part in parts if part.begin)
        return prefill(self, parts)

    monkeypatch.setattr(scheduler.BatchScheduler, "__init__", shortened)
    monkeypatch.setattr(scheduler.ModelExecutor, "prefill", noted)
    return begun


# The pool alone


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.data())
def test_a_pool_never_gives_a_block_twice_and_gets_all_back(count, size, data):
    pool, held = BlockPool(count, size), []
    for _ in range(data.draw(st.integers(0, 40))):
        what = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if what == "allocate":
            blocks = pool.allocate(data.draw(st.integers(0, pool.available)))
            used = {block for other in held for block in other}
            assert not used & set(blocks) and len(set(blocks)) == len(blocks) and UNUSED_BLOCK not in blocks
            held.append(blocks)
        elif held and what == "share":
            whole = data.draw(st.sampled_from(held))
            held.append(pool.share(whole[: data.draw(st.integers(0, len(whole)))]))
        elif held:
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        assert pool.available == count - len({block for blocks in held for block in blocks})
    for blocks in held:
        pool.release(blocks)
    assert pool.available == count and not any(pool.references)
    assert pool.blocks_for(0) == 0 and pool.blocks_for(1) == 1 and pool.blocks_for(size + 1) == (2 if size else 0)


# Against a cache of one row per slot: blocks as long as the longest sequence, which share nothing


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt2", "gemma2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_blocks_give_the_same_bits_as_one_row_per_sequence(name, dtype):
    model = tiny_model(name).to(dtype)
    rng = np.random.default_rng(len(name))
    for size in (4, 16, 32):
        requests = requests_of(rng.integers(1, 30, 7), group=3, seed=size)
        sampling = Sampling(max_tokens=int(rng.integers(5, 20)), stop_ids=STOPS)
        slots = int(rng.integers(2, 20))
        expected = engine_for(model, slots=slots, block_size=64).generate(requests, sampling)
        equal(engine_for(model, slots=slots, block_size=size).generate(requests, sampling), expected)


@pytest.mark.parametrize("kind", [LocalEngine, AsOnAGPU])
def test_any_memory_gives_the_same_completions(kind):
    """Sequences that are preempted and computed again: the same tokens; log-probabilities up to rounding."""
    model = tiny_model("llama")
    rng = np.random.default_rng(0)
    preempted = 0
    for turn in range(6):
        size, group = int(rng.choice([1, 4, 16])), int(rng.integers(1, 4))
        requests = requests_of(rng.integers(1, 30, 8), group=group, seed=turn)
        texts = ("e",) if turn == 3 else ()
        sampling = Sampling(max_tokens=int(rng.integers(10, 40)), stop_ids=STOPS, stop_texts=texts)
        expected = engine_for(model, slots=8).generate(requests, sampling)
        longest = -(-(30 + sampling.max_tokens) // size)  # blocks of one sequence
        blocks = int(rng.integers(longest, 3 * longest))
        engine = engine_for(model, kind, slots=8, block_size=size, cache_blocks=blocks)
        engine.frozen = True  # keeps the cache for inspection
        equal(engine.generate(requests, sampling), expected, 1e-5)
        assert all_free(engine)
        preempted += engine.preemptions
    assert preempted > 10


def test_preemption_keeps_penalties_streams_and_top_logprobs():
    engine = engine_for(tiny_model("llama"), slots=6, block_size=4, cache_blocks=24, frozen=True)
    kinds = [{"repetition_penalty": 1.4}, {"temperature": 0.0}, {"top_k": 5, "stop_texts": ("zq",)}]
    work = [
        (request, Sampling(max_tokens=30, **kinds[i % 3])) for i, request in enumerate(requests_of((9, 3, 7, 5, 8, 2)))
    ]
    work[0][0].top_logprobs = work[-1][0].top_logprobs = 3
    plenty = engine_for(tiny_model("llama"), slots=1)
    heard, known = {}, {}

    def hear(active):
        heard.setdefault(active.index, []).append(active.tokens[-1])
        known[active.index] = active

    with torch.inference_mode():
        session = engine.open_scheduler(64, 32, hear)
        for request, sampling in work:
            session.submit(request, sampling)
        ended = {}
        while session.busy:
            ended |= session.step()
    assert session.preemptions > 0 and all_free(session)
    for index, (request, sampling) in enumerate(work):
        (alone,) = plenty.generate([request], sampling)
        equal([ended[index]], [alone], 1e-5)
        assert heard[index] == alone.tokens[alone.mask].tolist()
        assert np.abs(np.array(known[index].logprobs) - alone.logprobs[alone.mask]).max() < 1e-5
        assert len(known[index].top_logprobs) == (30 if index in (0, 5) else 0)


def test_a_group_stores_its_prompt_once(monkeypatch):
    used = []
    reserve = scheduler.BatchScheduler.reserve_blocks

    def noted(self):
        steps = reserve(self)
        used.append(self.cache.pool.count - self.cache.pool.available)
        return steps

    monkeypatch.setattr(scheduler.BatchScheduler, "reserve_blocks", noted)
    engine = engine_for(tiny_model("llama"), slots=8, block_size=4)
    engine.generate(requests_of((22,), group=8), Sampling(max_tokens=3))
    assert used == [5 + 8, 5 + 8]  # 5 full blocks of the prompt, and one of each sequence for 2 + 2 more tokens
    used.clear()
    engine.generate(requests_of((22,) * 8), Sampling(max_tokens=3))
    assert used == [8 * 6, 8 * 6]


def test_cancelled_requests_free_their_blocks(monkeypatch):
    shorten_parts(monkeypatch, 8)
    engine = engine_for(tiny_model("llama"), slots=3, block_size=4, frozen=True)
    with torch.inference_mode():
        session = engine.open_scheduler(64, 32, lambda _: None)
        for request in requests_of((5, 30, 30, 6, 7)):
            session.submit(request, Sampling(max_tokens=20))
        session.step()
        assert session.prefilling and session.active and session.waiting
        for index in (1, 0, 4, 2, 3):
            session.cancel(index)
            session.cancel(index)
        assert not session.busy and all_free(session)
        session.submit(requests_of((9,))[0], Sampling(max_tokens=4))
        while session.busy:
            session.step()
    assert all_free(session)


def test_a_sequence_that_does_not_fit_is_refused_by_name():
    for lengths, max_tokens in (((40,), 4), ((4, 4), 60)):
        engine = engine_for(tiny_model("llama"), slots=2, block_size=4, cache_blocks=8)
        with pytest.raises(PosttrainError, match=r"one sequence of \d+ tokens does not fit .* memory for 32"):
            engine.generate(requests_of(lengths), Sampling(max_tokens=max_tokens))
        equal(engine.generate(requests_of((4,)), Sampling(max_tokens=4)), engine_for(
            tiny_model("llama")).generate(requests_of((4,)), Sampling(max_tokens=4)))  # fmt: skip


# Long prompts


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v3", "gpt2"])
def test_prompts_in_parts_give_the_same(name, monkeypatch):
    """Sliding windows, capped scores, sinks and keys of another width than values included."""
    model = tiny_model(name)
    requests = requests_of((50, 3, 41, 33, 5), group=2)
    sampling = Sampling(max_tokens=8)
    expected = engine_for(model, slots=5).generate(requests, sampling)
    begun = shorten_parts(monkeypatch, 16)
    equal(engine_for(model, slots=5, block_size=8).generate(requests, sampling), expected, 1e-5)
    assert {16, 32, 48} == set(begun)


def test_others_go_on_decoding_while_a_long_prompt_is_computed(monkeypatch):
    shorten_parts(monkeypatch, 8)
    engine = engine_for(tiny_model("llama"), slots=3)
    heard = []
    with torch.inference_mode():
        session = engine.open_scheduler(64, 32, lambda active: heard.append(active.index))
        short, long = requests_of((4, 50))
        session.submit(short, Sampling(max_tokens=30))
        session.step()
        session.submit(long, Sampling(max_tokens=4))
        while 1 not in heard:
            session.step()
    assert heard.count(0) >= 7, "one token between two of the 7 parts"


def test_long_limits_cost_no_memory_until_they_are_used():
    model = tiny_model("llama", max_position_embeddings=2**17)
    engine = engine_for(model, slots=64)
    engine.generate(requests_of((5,)), Sampling(max_tokens=4))
    before = peak_memory_gib()
    engine.generate(requests_of((5,) * 64), Sampling(max_tokens=2**17 - 8, stop_ids=tuple(range(104))))
    reserved = 64 * 2**17 * engine.bytes_per_position / 2**30
    assert reserved >= 2 and peak_memory_gib() - before < 0.25


def test_the_cache_is_limited_by_memory(monkeypatch):
    engine = engine_for(tiny_model("llama"))
    assert engine.blocks_for(4, 640) == 40
    monkeypatch.setattr(local, "host_memory", lambda: 2 * 16 * 64 * engine.bytes_per_position)
    assert engine.blocks_for(4, 640) == 16


# Prefixes of earlier requests


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12), st.integers(1, 3), st.data())
def test_known_blocks_are_found_until_they_are_needed(count, size, data):
    """Blocks that a pool finds hold the tokens that were registered; known blocks do not reduce what is available."""
    pool, contents = BlockPool(count, size), {}
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.integers(0, 9)) == 0:
            pool.forget()
            contents.clear()
        length = data.draw(st.integers(1, count * size))
        tokens = np.array(data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), dtype=np.int32)
        hashes = block_hashes(tokens, size)
        assert hashes == block_hashes(tokens, size, hashes[:1])
        found = pool.find(hashes)
        for index, block in enumerate(found):
            assert contents[block] == tokens[: (index + 1) * size].tolist()
        blocks = pool.share(found)
        blocks += pool.allocate(pool.blocks_for(length) - len(found))
        assert len(set(blocks)) == len(blocks)
        pool.register(blocks, hashes)
        for index in range(len(hashes)):
            if pool.hash_of.get(blocks[index]) == hashes[index]:
                contents[blocks[index]] = tokens[: (index + 1) * size].tolist()
        pool.release(blocks)
        assert pool.available == count and pool.find(hashes)[: len(found)] == found
    pool.reset()
    assert pool.available == count and sorted([*pool.free, *pool.idle]) == list(range(1, count + 1))


def conversations():
    """Requests of two conversations whose later turns begin with the earlier ones, and a stranger."""
    rng = np.random.default_rng(0)
    whole = [rng.integers(8, 60, 60).astype(np.int32) for _ in range(2)]
    lengths = [(0, 20), (1, 17), (0, 37), (1, 33), (0, 60), (1, 60)]
    requests = [GenerationRequest(prompt=whole[i][:n], seed=n, reuse_prefix=True) for i, n in lengths]
    return [*requests, GenerationRequest(prompt=whole[0][1:50], seed=9, reuse_prefix=True)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_later_turns_reuse_earlier_ones_with_the_same_result(name):
    model, sampling = tiny_model(name), Sampling(max_tokens=6)
    alone = engine_for(model, slots=2)
    expected = [alone.generate([request], sampling)[0] for request in conversations()]
    assert not any(sample.reused for sample in expected), "a training engine on a CPU computes everything"
    engine = engine_for(model, slots=2, block_size=8, frozen=True)
    found = [sample for i in (0, 2, 4, 6) for sample in engine.generate(conversations()[i : i + 2], sampling)]
    equal(found, expected, 1e-5)
    shares = [0, 0, 16 / 37, 16 / 33, 32 / 60, 32 / 60, 0]
    assert [sample.reused for sample in found] == pytest.approx(shares)
    assert all_free(engine)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("how", [{}, {"cache_blocks": 14}, {"speculative_tokens": 3}], ids=str)
def test_a_cache_of_latents_gives_what_keys_and_values_give(name, how, monkeypatch):
    """With prompts in parts, prefixes that are reused, preemption and drafts, as the decoder runs on a GPU."""
    model, sampling = tiny_model(name), Sampling(max_tokens=20)
    requests = [*conversations(), *requests_of((30, 3, 12), group=3)]
    expected = engine_for(model, slots=4).generate(requests, sampling)
    monkeypatch.setattr(FusedDecoder, "supports", staticmethod(supports_fused_layers))
    begun = shorten_parts(monkeypatch, 16)
    engine = engine_for(model, slots=4, block_size=8, frozen=True, **how)
    turns = requests[:2], requests[2:4], requests[4:7], requests[7:]
    found = [sample for few in turns for sample in engine.generate(few, sampling)]
    equal(found, expected, 1e-5)
    keys, values = engine.executor.cache.layers[0]
    assert keys.shape[2:] == (1, 16 + 8) and values.data_ptr() == keys.data_ptr(), "one tensor of latents per layer"
    assert begun and any(sample.reused for sample in found) and all_free(engine)
    assert bool(engine.preemptions) == ("cache_blocks" in how)


def test_adapted_keys_and_values_of_latents_run_the_models_own_code():
    model = tiny_model("deepseek_v3")
    own = model.model.layers[1].self_attn
    assert LatentAttention.supports(own)
    add_adapters(model, ModelConfig(path="tiny", lora_rank=2, lora_target_modules=("kv_b_proj",)), "token")
    assert not LatentAttention.supports(own) and not FusedDecoder.supports(model)


def test_what_was_generated_is_found_by_the_next_turn_of_a_stream():
    engine = engine_for(tiny_model("llama"), slots=2, block_size=8, frozen=True)
    first = GenerationRequest(prompt=conversations()[0].prompt, seed=1, reuse_prefix=True)
    with torch.inference_mode():
        session = engine.open_scheduler(128, 64, lambda _: None)
        ended = {}
        session.submit(first, Sampling(max_tokens=30))
        while session.busy:
            ended |= session.step()
        again = GenerationRequest(prompt=np.append(ended[0].tokens, 9).astype(np.int32), seed=2, reuse_prefix=True)
        session.submit(again, Sampling(max_tokens=5))
        while session.busy:
            ended |= session.step()
    assert session.reused_tokens == 48  # of 20 + 30 + 1; the last token that was sampled is not in the cache
    equal([ended[1]], engine_for(tiny_model("llama")).generate([again], Sampling(max_tokens=5)), 1e-5)


def test_prefixes_are_dropped_when_weights_change_or_blocks_are_needed():
    model, sampling = tiny_model("llama"), Sampling(max_tokens=4)
    engine = engine_for(model, slots=1, block_size=8, cache_blocks=8, frozen=True)
    request = conversations()[2]

    def reused():
        (sample,) = engine.generate([request], sampling)
        fresh = engine_for(model, slots=1)
        equal([sample], fresh.generate([request], sampling), 1e-5)
        return round(sample.reused * len(request.prompt))

    assert [reused(), reused()] == [0, 32]
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    engine.decoder.unpack()
    assert [reused(), reused()] == [0, 32]
    engine.weights_changed()
    assert [reused(), reused()] == [0, 32]
    engine.generate(requests_of((50,)), sampling)  # needs blocks that were kept
    assert reused() < 32
    engine.sleep()
    assert reused() == 0


def test_weights_that_change_between_steps_end_the_reuse():
    model, sampling = tiny_model("llama"), Sampling(max_tokens=4)
    engine = engine_for(model, slots=1, block_size=8, frozen=True)
    engine.generate(conversations()[:1], sampling)
    versions = iter(range(100))
    found = engine.generate(conversations()[2:5:2], sampling, between_steps=lambda: next(versions))
    assert [sample.reused > 0 for sample in found] == [True, False]


def test_a_prompt_computed_with_two_versions_of_the_weights_is_not_reused(monkeypatch):
    """The second version arrives between two parts of the prompt; the completion has the second version only."""
    shorten_parts(monkeypatch, 8)
    engine = engine_for(tiny_model("llama"), slots=1, block_size=8, frozen=True)
    sampling = Sampling(max_tokens=4, stop_texts=("never generated",))
    versions = iter([0, 0, *[1] * 100])
    (first,) = engine.generate(conversations()[2:3], sampling, between_steps=lambda: next(versions))
    assert (first.version, first.newest) == (1, 1)
    (later,) = engine.generate(conversations()[4:5], sampling)
    assert later.reused == 0
