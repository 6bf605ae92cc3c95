"""Requests that arrive while others run, each with its own settings, and requests that are cancelled."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.core import ops
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.stop_text import StopTextMatcher
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.data.made import byte_level, sentencepiece
from tests.unit.engines.test_local import AsOnAGPU, engine_for, prompts

KINDS = [
    {},
    {"temperature": 0.0, "max_tokens": 3},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 4, "stop_ids": tuple(range(8, 60))},
    {"repetition_penalty": 1.5, "stop_texts": ("e",)},
    {"min_p": 0.1, "max_tokens": 1},
]


def asked():
    """Several of each kind, with different prompts."""
    texts = prompts((5, 11, 3, 8, 20, 1, 9, 14, 2, 6, 7, 4), seed=3)
    return [
        (GenerationRequest(prompt=text, seed=i), Sampling(**{"max_tokens": 16, **KINDS[i % len(KINDS)]}))
        for i, text in enumerate(texts)
    ]


def run_together(engine, work, arrive_every=2):
    """Submit one request every few steps to one scheduler; returns samples, and the streamed tokens, by number."""
    heard, ended, waiting = {}, {}, list(work)

    def hear(answer):
        heard.setdefault(answer.index, []).append((answer.tokens[-1], answer.logprobs[-1]))

    with torch.inference_mode():
        session = engine.open_scheduler(max_length=64, max_tokens=32, on_new_token=hear)
        for tick in range(10_000):
            if waiting and tick % arrive_every == 0:
                session.submit(*waiting.pop(0))
            if session.busy:
                ended |= session.step()
            elif not waiting:
                break
    return ended, heard


def as_on_a_gpu(model, slots):
    return AsOnAGPU(ModelRunner.from_model(model), tiny_tokenizer(), slots=slots)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("on_gpu", "slots"), [(False, 5), (True, 8), (True, 5)])  # memory may allow any number
def test_each_completion_is_the_same_as_alone(name, on_gpu, slots):
    model = tiny_model(name)
    alone = engine_for(model, slots=1)
    expected = [alone.generate([request], sampling)[0] for request, sampling in asked()]
    engine = as_on_a_gpu(model, slots) if on_gpu else engine_for(model, slots=slots)
    ended, heard = run_together(engine, asked())
    assert sorted(ended) == list(range(len(expected)))
    for index, sample in enumerate(expected):
        assert ended[index].tokens.tolist() == sample.tokens.tolist()
        assert ended[index].finish == sample.finish
        assert np.abs(ended[index].logprobs - sample.logprobs).max() < 1e-5
        tokens, logprobs = zip(*heard[index], strict=True)
        assert list(tokens) == sample.tokens[sample.mask].tolist()
        assert np.abs(np.array(logprobs) - sample.logprobs[sample.mask]).max() < 1e-5
    assert {sample.finish for sample in ended.values()} == {"stop", "length"}


def test_a_long_request_joins_short_ones():
    engine = engine_for(tiny_model("llama", max_position_embeddings=1024), slots=3)
    (long,) = prompts((400,))
    work = [
        (GenerationRequest(prompt=prompts((5,))[0], seed=1), Sampling(max_tokens=40)),
        (GenerationRequest(prompt=long, seed=2), Sampling(max_tokens=8)),
    ]
    expected = [engine.generate([request], sampling)[0] for request, sampling in work]
    with torch.inference_mode():
        session = engine.open_scheduler(max_length=1024, max_tokens=64, on_new_token=lambda _: None)
        session.submit(*work[0])
        ended = session.step() | session.step()
        session.submit(*work[1])
        while session.busy:
            ended |= session.step()
    assert [ended[index].tokens.tolist() for index in (0, 1)] == [sample.tokens.tolist() for sample in expected]


def test_a_cancelled_request_gives_its_slot_to_the_next():
    engine = engine_for(tiny_model("llama"), slots=2)
    heard = []
    with torch.inference_mode():
        session = engine.open_scheduler(64, 32, lambda answer: heard.append(answer.index))
        for seed, prompt in enumerate(prompts((4, 5, 6, 7))):
            session.submit(GenerationRequest(prompt=prompt, seed=seed), Sampling(max_tokens=20))
        for _ in range(3):
            session.step()
        assert set(heard) == {0, 1} and len(session.waiting) == 2
        session.cancel(0)
        session.cancel(3)
        session.cancel(99)
        ended = {}
        while session.busy:
            ended |= session.step()
    assert sorted(ended) == [1, 2] and 3 not in heard
    assert heard.count(0) == 3 and heard.count(2) == 20
    for index in (1, 2):
        request = GenerationRequest(prompt=prompts((4, 5, 6, 7))[index], seed=index)
        (alone,) = engine.generate([request], Sampling(max_tokens=20))
        assert ended[index].tokens.tolist() == alone.tokens.tolist()


def test_an_idle_scheduler_takes_the_next_request():
    engine = engine_for(tiny_model("llama"), slots=2)
    request, sampling = GenerationRequest(prompt=prompts((4,))[0]), Sampling(max_tokens=5)
    with torch.inference_mode():
        session = engine.open_scheduler(max_length=64, max_tokens=32, on_new_token=lambda _: None)
        for _ in range(2):
            number = session.submit(request, sampling)
            session.step()
            session.cancel(number)
            assert not session.busy
        number, ended = session.submit(request, sampling), {}
        while session.busy:
            ended |= session.step()
    assert number == 2 and ended[2].tokens.tolist() == engine.generate([request], sampling)[0].tokens.tolist()


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "top_k": 3}, {"repetition_penalty": 1.5}], ids=str)
def test_top_logprobs_are_of_the_distribution_that_is_sampled(settings):
    engine = engine_for(tiny_model("llama"))
    told = {}
    request = GenerationRequest(prompt=prompts((6,))[0], seed=5, top_logprobs=4)
    with torch.inference_mode():
        session = engine.open_scheduler(64, 32, lambda answer: told.update({answer.index: answer}))
        session.submit(GenerationRequest(prompt=prompts((9,))[0], seed=1), Sampling(max_tokens=9, **settings))
        number = session.submit(request, Sampling(max_tokens=7, **settings))
        ended = {}
        while session.busy:
            ended |= session.step()
    answer, sample = told[number], ended[number]
    assert not told[0].top_logprobs and len(answer.top_logprobs) == len(answer.tokens) == 7
    logits = engine.runner.logits(engine.runner.run_layers(collate([sample])).last_hidden_state[0]).detach()
    penalty = settings.get("repetition_penalty", 1.0)
    truncation = {name: value for name, value in settings.items() if name != "repetition_penalty"}
    for place, top_logprobs in enumerate(answer.top_logprobs):
        row = logits[5 + place].clone()
        seen = torch.as_tensor(sample.tokens[: 6 + place]).long().unique()
        row[seen] = torch.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        expected = ops.tempered(row, **truncation).log_softmax(-1)
        best = expected.topk(settings.get("top_k", 4)).indices.tolist()
        assert [token for token, _ in top_logprobs] == best
        assert np.abs([chance - float(expected[token]) for token, chance in top_logprobs]).max() < 1e-5
        chosen = dict(top_logprobs).get(answer.tokens[place])
        assert chosen is None or abs(chosen - answer.logprobs[place]) < 1e-5


def test_sampling_groups_are_limited():
    engine = engine_for(tiny_model("llama"), slots=2)
    with torch.inference_mode():
        session = engine.open_scheduler(max_length=64, max_tokens=32, on_new_token=lambda _: None)
        for number in range(600):
            session.submit(
                GenerationRequest(prompt=prompts((1,))[0]), Sampling(max_tokens=1, temperature=1 + number / 600)
            )
        ended = {}
        while session.busy:
            ended |= session.step()
    assert len(ended) == 600 and len(session.groups) <= 256


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_a_scheduler_on_a_gpu(name):
    model = tiny_model(name).to("cuda")
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), slots=8)
    expected = [engine.generate([request], sampling)[0] for request, sampling in asked()]
    for arrive_every in (1, 3):
        ended, _ = run_together(engine, asked(), arrive_every)
        same = [
            index for index, sample in enumerate(expected) if ended[index].tokens.tolist() == sample.tokens.tolist()
        ]
        assert len(same) >= len(expected) - 1  # a last bit may put a boundary between two tokens elsewhere
        assert all(np.abs(ended[i].logprobs - expected[i].logprobs).max() < 1e-4 for i in same)
    graphs = engine.executor.graphs
    assert name == "gpt2" or (graphs is not None and any(key[1] is None for key in graphs.captured))


TOKENIZERS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(None, legacy=False),
    "legacy sentencepiece": sentencepiece(None, legacy=True),
    "characters": tiny_tokenizer(),
}
PIECES = ["Hello a", " Hello", "\n\n", "你好", "é", "🙂", "x = 1", "<|im_end|>", "."]


@settings(max_examples=150, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_text_is_seen_with_the_token_that_completes_it(name, data):
    """Equal to decoding the tail again after each token."""
    tokenizer = TOKENIZERS[name]
    some = st.sampled_from(PIECES).map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    any_token = st.integers(0, len(tokenizer) - 1).map(lambda token: [token])
    tokens = [token for piece in data.draw(st.lists(some | any_token, min_size=1, max_size=8)) for token in piece]
    assume(tokens)
    said = tokenizer.decode(tokens)
    first = data.draw(st.integers(0, max(0, len(said) - 1)))
    texts = (said[first : first + data.draw(st.integers(1, 3))] or ".", data.draw(st.sampled_from([".", "\n", "l"])))
    longest, ends = max(map(len, texts)), StopTextMatcher(tokenizer)
    for count in range(1, len(tokens) + 1):
        tail = tokenizer.decode(tokens[max(0, count - longest - 8) : count])
        expected = any(text in tail for text in texts)
        assert ends.matches(texts, tokens[:count]) == expected, (texts, tokens[:count])
        if expected:
            break
