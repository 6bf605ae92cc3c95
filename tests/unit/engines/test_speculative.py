"""Speculative decoding: the same completions as without, in every setting; what is drafted, and when."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import UsageError
from posttrain.engines import drafts, scheduler
from posttrain.engines.base import EngineSpec, GenerationRequest, Sampling
from posttrain.engines.drafts import COMPLETIONS_PER_PROMPT, NGRAM_SIZES, Drafter, NgramIndex
from posttrain.engines.local import LocalEngine
from posttrain.nn.forward import ModelRunner
from tests.tiny import MIXTURES, NAMES, saved_adapter, tiny_model, tiny_tokenizer
from tests.unit.engines import test_adapter_set
from tests.unit.engines.test_local import AsOnAGPU
from tests.unit.engines.test_local import engine_for as small_engine
from tests.unit.engines.test_paging import all_free, engine_for, equal, requests_of
from tests.unit.engines.test_scheduler import asked, run_together

KINDS = (LocalEngine, AsOnAGPU)
SETTINGS = (
    {},
    {"temperature": 0.0},
    {"temperature": 0.2},
    {"temperature": 0.5, "top_p": 0.8, "top_k": 9, "min_p": 0.02},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "stop_texts": ("e", "ab")},
)


def drafting_engine(model, kind=LocalEngine, **options):
    """An engine that also drafts what earlier calls generated, as on a GPU."""
    engine = engine_for(model, kind, frozen=True, **{"speculative_tokens": 4} | options)  # keeps the cache, too
    engine.keeps_completions = True
    return engine


def counts(samples):
    return sum(sample.draft_tokens for sample in samples), sum(sample.accepted_tokens for sample in samples)


# What is drafted


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4), st.integers(1, 5))
def test_a_draft_is_what_followed_the_longest_known_ngram(texts, count):
    prompt, *completions = texts
    index = NgramIndex(prompt, completions[:1])
    numbers = [1, *(index.add(tokens) for tokens in completions[1:])][: len(completions)]
    for number in numbers:
        index.update(number)
    whole = [prompt, *(prompt + tokens for tokens in completions)]
    for number in numbers:
        own, draft = whole[number], index.draft(number, count)
        followers = {
            size: [
                text[end:] for text in whole for end in range(size, len(text)) if text[end - size : end] == own[-size:]
            ]
            for size in NGRAM_SIZES
            if size <= len(own)
        }
        known = next((found for found in followers.values() if found), [])
        assert bool(draft) == bool(known) and len(draft) <= count
        assert not draft or any(draft[: len(found)] == found[: len(draft)] for found in known)


def test_a_repetition_is_drafted_to_the_end():
    index = NgramIndex([1, 2])
    number = index.add([5, 6, 7, 5, 6, 7, 5, 6])
    index.update(number)
    assert index.draft(number, 7) == [7, 5, 6, 7, 5, 6, 7]


def test_completions_of_a_prompt_are_kept_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(drafts, "KEPT_TOKENS", 300)
    drafter, requests = Drafter(4, 8), requests_of((5, 6, 7))
    own = drafter.open(requests[0], [])
    for number in range(COMPLETIONS_PER_PROMPT + 2):
        drafter.keep(requests[0], np.array([number] * 10, dtype=np.int32), indexed=number > 0)
    kept = drafter.finished[drafts.prompt_key(requests[0])]
    assert [int(tokens[0]) for tokens in kept] == list(range(2, COMPLETIONS_PER_PROMPT + 2))
    assert len(own.ngrams.sequences) == 3, "the prompt, the sequence, and the completion that is not its index already"
    for request in requests[1:]:
        drafter.keep(request, np.arange(120, dtype=np.int32), indexed=False)
    assert drafter.kept_tokens == 240 and len(drafter.finished) == 2, "the prompt that was used longest ago is dropped"
    drafter.keep(replace(requests[1], adapter="other"), np.arange(2, dtype=np.int32), indexed=False)
    assert len(drafter.finished) == 3, "completions of another adapter are apart"
    del own
    assert not drafter.active
    drafter.forget()
    assert not drafter.finished and not drafter.kept_tokens


def test_refused_drafts_pause():
    sequence = Drafter(4, 8).open(requests_of((3,))[0], tokens := [1, 1, 1])
    drafted_at = []
    for _ in range(40):
        sequence.proposed = sequence.propose(1)  # always 1
        if sequence.proposed:
            drafted_at.append(len(tokens))
            sequence.report([2])
        tokens.append(1)
    assert np.diff(drafted_at).tolist() == [2, 3, 5, 9, 17]
    sequence.proposed = [1]
    sequence.report([1])
    assert sequence.pause == 0 and (sequence.accepted, sequence.drafted) == (1, 7)


# Against the same engine without


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_completions_are_the_same_as_without(kind, how):
    """Drafts of the sequence and its siblings; then of completions that were the same, which are accepted."""
    model = tiny_model("llama")
    requests = requests_of((9, 3, 7), group=3)
    sampling = Sampling(max_tokens=60, stop_ids=(8, 9), **how)
    expected = engine_for(model, slots=5).generate(requests, sampling)
    engine = drafting_engine(model, kind, slots=5, speculative_tokens=4, block_size=4)
    for epoch in range(2):
        found = engine.generate(requests, sampling)
        equal(found, expected, 1e-5)
        assert all_free(engine)
        assert epoch == 0 or counts(found)[1] > 0.4 * sum(int(sample.mask.sum()) for sample in found)


@pytest.mark.parametrize("name", sorted({*NAMES, *MIXTURES}))
def test_greedy_is_the_same_token_by_token(name):
    """For all families: windows, capped scores, sinks, latent attention, experts, learned positions."""
    model = tiny_model(name)
    requests, sampling = requests_of((9, 3, 20)), Sampling(max_tokens=40, temperature=0.0)
    expected = engine_for(model, slots=3).generate(requests, sampling)
    engine = drafting_engine(model, slots=3, speculative_tokens=5, record_experts=True)
    for _ in range(2):
        found = engine.generate(requests, sampling)
        equal(found, expected, 1e-5)
    assert counts(found)[1] > 60


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_sizes_give_the_same(data):
    """Lengths, blocks, memory, slots, drafts; in double precision, where rounding does not decide about tokens."""
    model, draw = MODEL, data.draw
    lengths = draw(st.lists(st.integers(1, 25), min_size=1, max_size=5))
    requests = requests_of(lengths, group=draw(st.integers(1, 3)), seed=draw(st.integers(0, 3)))
    how = draw(st.sampled_from(SETTINGS))
    sampling = Sampling(max_tokens=draw(st.integers(1, 30)), stop_ids=draw(st.sampled_from([(), (8, 9, 10)])), **how)
    expected = engine_for(model, slots=8).generate(requests, sampling)
    size = draw(st.sampled_from([1, 3, 16]))
    longest = -(-(max(lengths) + sampling.max_tokens) // size)  # blocks of one sequence
    engine = drafting_engine(
        model,
        draw(st.sampled_from(KINDS)),
        slots=draw(st.integers(1, 8)),
        block_size=size,
        cache_blocks=draw(st.integers(longest + 1, 4 * longest)),
        speculative_tokens=draw(st.integers(1, 6)),
        speculative_max_sequences=draw(st.integers(1, 8)),
    )
    preempted = 0
    for _ in range(draw(st.integers(1, 2))):
        found = engine.generate(requests, sampling)
        equal(found, expected, 1e-6)
        preempted += sum(sample.preemptions for sample in found)
        assert all_free(engine) and engine.preemptions == preempted


MODEL = tiny_model("llama").double()


def test_samples_follow_the_distribution():
    """Of all completions of 4 tokens of a vocabulary of 3, all of them with drafts: chi-square."""
    model = tiny_model("llama", vocab_size=3, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    prompt, drawn, length = np.array([0, 1, 2, 2, 0, 2, 1, 1, 0, 0], dtype=np.int32), 2000, 4
    requests = [GenerationRequest(prompt=prompt, seed=seed) for seed in range(drawn)]
    engine = engine_for(model, slots=64, speculative_tokens=3, speculative_max_sequences=64)
    samples = engine.generate(requests, Sampling(max_tokens=length))
    drafted, accepted = counts(samples)
    assert drafted > drawn and 0.2 * drafted < accepted < 0.8 * drafted
    digits = 3 ** np.arange(length)
    found = np.bincount([int(sample.tokens[-length:] @ digits) for sample in samples], minlength=3**length)
    every = np.array(list(product(range(3), repeat=length)))
    whole = torch.from_numpy(np.concatenate([np.tile(prompt, (len(every), 1)), every], 1)).long()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logprobs = model(whole).logits.log_softmax(-1)[:, len(prompt) - 1 : -1]
    chances = logprobs.gather(2, whole[:, len(prompt) :, None])[..., 0].sum(1).exp().double().numpy()
    expected = np.zeros(3**length)
    expected[every @ digits] = chances * drawn
    statistic, freedom = ((found - expected) ** 2 / expected).sum(), 3**length - 1
    assert expected.min() > 5 and statistic < freedom + 4 * (2 * freedom) ** 0.5  # 4 standard deviations


# Parts of the engine


def test_tokens_are_drafted_only_when_few_sequences_are_left(monkeypatch):
    steps, run_step = [], scheduler.BatchScheduler.run_step

    def noted(self, count, drafted):
        steps.append((len(self.active), drafted))
        run_step(self, count, drafted)

    monkeypatch.setattr(scheduler.BatchScheduler, "run_step", noted)
    for kind in KINDS:
        few = {"speculative_tokens": 4, "speculative_max_sequences": 2}
        engine = drafting_engine(tiny_model("llama"), kind, slots=6, **few)
        for _ in range(2):
            steps.clear()
            stops = tuple(range(8, 16))
            engine.generate(requests_of((9, 3, 7, 5, 4, 8)), Sampling(max_tokens=60, stop_ids=stops))
        few_active = {active for active, drafted in steps if drafted}
        assert few_active and few_active <= {1, 2} and max(steps)[0] == 6
        assert kind is LocalEngine or {drafted for _, drafted in steps} == {0, 4}


def test_drafts_preempt_nobody():
    """With memory for exactly the sequences, drafts are cut where the blocks end."""
    model, sampling = tiny_model("llama"), Sampling(max_tokens=40, temperature=0.0)
    requests = requests_of((8, 8, 8))
    expected = engine_for(model).generate(requests, sampling)
    engine = drafting_engine(model, slots=3, block_size=4, cache_blocks=3 * 12, speculative_tokens=6)
    for _ in range(2):
        found = engine.generate(requests, sampling)
        equal(found, expected, 1e-5)
    assert engine.preemptions == 0 and counts(found)[1] > 80 and all_free(engine)
    small = drafting_engine(model, slots=3, block_size=4, cache_blocks=20, speculative_tokens=6)
    equal(small.generate(requests, sampling), expected, 1e-5)
    assert small.preemptions > 0 and all_free(small)


@pytest.mark.parametrize("kind", KINDS)
def test_each_completion_of_a_scheduler_is_the_same_as_alone(kind):
    """Requests with settings of their own, which arrive while others run; the second time all were seen before."""
    model = tiny_model("llama")
    alone = small_engine(model, slots=1)
    work = asked()
    work += [(replace(request, seed=50 + i, top_logprobs=2), how) for i, (request, how) in enumerate(work[:4])]
    expected = [alone.generate([request], sampling)[0] for request, sampling in work]
    engine = kind(ModelRunner.from_model(model), tiny_tokenizer(), slots=5, speculative_tokens=3, frozen=True)
    for _ in range(2):
        ended, heard = run_together(engine, work)
        for index, sample in enumerate(expected):
            equal([ended[index]], [sample], 1e-5)
            tokens, logprobs = zip(*heard[index], strict=True)
            assert list(tokens) == sample.tokens[sample.mask].tolist()
            assert np.abs(np.array(logprobs) - sample.logprobs[sample.mask]).max() < 1e-5
    drafted, accepted = counts(list(ended.values())[: len(asked())])
    assert accepted > 0.5 * drafted > 10 and counts([ended[i] for i in range(len(asked()), len(work))]) == (0, 0)


class OnlyEven:
    """A constraint: even tokens, each larger than the one before, then token 8."""

    def __init__(self):
        self.last = 8

    def fill_mask(self, words):
        for token in [*range(self.last + 2, 60, 2), 8]:
            words[token // 32] |= np.int32(1 << token % 32) if token % 32 < 31 else np.int32(-(2**31))

    def advance(self, token):
        self.last = token if token != 8 else 58


def test_constrained_completions_are_kept_beside_drafted_ones():
    engine = small_engine(tiny_model("llama"), slots=4)
    engine.frozen, engine.drafter = True, Drafter(4, 8)
    free, sampling = requests_of((9, 4)), Sampling(max_tokens=24, stop_ids=(8,), temperature=0.3)
    expected = small_engine(tiny_model("llama")).generate(free, sampling)
    ended = {}
    for _ in range(2):
        work = [(free[0], sampling), (replace(free[0], constraint=OnlyEven()), sampling), (free[1], sampling)]
        ended, _ = run_together(engine, work, arrive_every=1)
        equal([ended[0], ended[2]], expected, 1e-5)
        tokens = ended[1].tokens[ended[1].mask].tolist()
        assert tokens[-1] == 8 and tokens[:-1] == sorted(set(tokens[:-1])) and not any(token % 2 for token in tokens)
    assert ended[0].accepted_tokens and not ended[1].draft_tokens


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_recorded_of_what_was_accepted(name):
    model, sampling = tiny_model(name), Sampling(max_tokens=20)
    requests = requests_of((3, 20, 7), group=2)
    expected = engine_for(model, record_experts=True).generate(requests, sampling)
    engine = drafting_engine(model, record_experts=True, speculative_tokens=3, block_size=4)
    for _ in range(2):
        found = engine.generate(requests, sampling)
        equal(found, expected, 1e-5)
        assert all((a.experts == b.experts).all() for a, b in zip(found, expected, strict=True))
    assert counts(found)[1] > 60


def test_each_sequence_keeps_its_adapter(tmp_path):
    folders = {"two": saved_adapter(tiny_model("llama"), tmp_path / "two", 2)}
    requests = test_adapter_set.requests(["", "two"])
    found = []
    for tokens in (0, 3):
        engine = drafting_engine(tiny_model("llama"), slots=12, speculative_tokens=tokens)
        engine.use_adapters(folders)
        for _ in range(2):
            found.append(engine.generate(requests, Sampling(max_tokens=20)))
    for samples in found[1:]:
        equal(samples, found[0], 1e-5)
    assert counts(found[-1])[1] > 100


def test_weights_that_change_in_flight_sample_what_follows():
    """A token's log-probability is of the weights at its step, and the versions say so."""
    model = tiny_model("qwen2_untied")
    engine = engine_for(model, slots=3, speculative_tokens=4)
    calls = []

    def louder():
        calls.append(len(calls))
        if len(calls) == 4:
            model.lm_head.weight.data.mul_(1.5)  # nothing in the cache depends on it
        return int(len(calls) >= 4)

    samples = engine.generate(requests_of((9, 4, 6)), Sampling(max_tokens=30, temperature=0.0), between_steps=louder)
    assert counts(samples)[1] > 10 and len(calls) < 30 and {(s.version, s.newest) for s in samples} == {(0, 1)}
    model.set_attn_implementation("eager")
    for sample in samples:
        whole = torch.from_numpy(sample.tokens).long()[None]
        with torch.no_grad():
            logits = model(whole).logits[0, :-1]
        later, earlier = (
            scaled.log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0] for scaled in (logits, logits / 1.5)
        )
        errors = [
            np.abs(logprobs.numpy() - sample.logprobs[1:])[sample.mask[1:]] < 1e-5 for logprobs in (earlier, later)
        ]
        switch = int(errors[0].argmin())
        assert 0 < switch < 30 and errors[0][:switch].all() and errors[1][switch:].all()


def test_equal_runs_on_a_cpu_compute_equally():
    """A call does not depend on earlier ones: a resumed run equals an uninterrupted one, and so does a file."""
    model, requests, sampling = (
        tiny_model("llama"),
        requests_of((9, 3), group=3),
        Sampling(max_tokens=40, temperature=0.3),
    )
    for frozen in (False, True):
        engine = engine_for(model, speculative_tokens=4, frozen=frozen)
        first, second = engine.generate(requests, sampling), engine.generate(requests, sampling)
        equal(second, first)
        assert counts(first) == counts(second) and counts(first)[0]
        scheduler = engine.open_scheduler(64, 32, lambda _: None)
        assert (scheduler.drafter is None) != frozen, "requests arrive at any time and in any order"
    engine = drafting_engine(model)
    first, second = engine.generate(requests, sampling), engine.generate(requests, sampling)
    assert counts(second)[1] > counts(first)[1], "completions of earlier calls are drafts"


def test_siblings_draft_for_each_other():
    """Of two equal completions, the one that begins later is drafted from the other, finished or not."""
    model, sampling = tiny_model("llama"), Sampling(max_tokens=24)
    (request,) = requests_of((9,))
    engine = engine_for(model, slots=1, speculative_tokens=4)
    first, second = engine.generate([request] * 2, sampling)  # one after the other
    assert first.tokens.tolist() == second.tokens.tolist()
    assert second.accepted_tokens > 15 > first.accepted_tokens
    ended = {}
    with torch.inference_mode():
        session = engine_for(model, slots=2, speculative_tokens=4, frozen=True).open_scheduler(64, 32, lambda _: None)
        session.submit(request, sampling)
        for _ in range(12):
            ended |= session.step()
        session.submit(request, sampling)
        while session.busy:
            ended |= session.step()
    assert ended[0].tokens.tolist() == ended[1].tokens.tolist() == first.tokens.tolist()
    assert ended[1].accepted_tokens > 6 > ended[0].accepted_tokens


# Options


def test_settings_that_cannot_be():
    for wrong in ({"speculative_tokens": -1}, {"speculative_max_sequences": 0}):
        with pytest.raises(UsageError, match="must be at least"):
            EngineSpec(**wrong)
    runner = ModelRunner.from_model(tiny_model("llama"), packed=False)
    with pytest.raises(UsageError, match="speculative_tokens is 2, but LlamaForCausalLM generates by its own code"):
        LocalEngine(runner, tiny_tokenizer(), speculative_tokens=2)
