"""The engine against transformers' generate, a teacher-forced forward pass, and itself in other company."""

import numpy as np
import pytest
import torch

from posttrain.data.pack import collate
from posttrain.engines.base import Request, Sampling
from posttrain.engines.local import LocalEngine, inverse_cdf, uniforms
from posttrain.models import attention
from posttrain.models.forward import Trunk, forward
from posttrain.types import Request as Wanted
from posttrain.types import Sample
from tests.tiny import NAMES, tiny_model, tiny_tokenizer


def engine_for(model, slots=4):
    model.set_attn_implementation(attention.NAME)
    return LocalEngine(Trunk.of(model.eval()), tiny_tokenizer(), slots=slots)


def prompts(lengths=(5, 11, 3, 8, 20, 1), seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(8, 60, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_transformers_generate(name):
    model = tiny_model(name).eval()
    asked = prompts()
    model.set_attn_implementation("eager")
    expected = []
    for prompt in asked:
        ids = torch.as_tensor(prompt).long()[None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        expected.append(out[0, len(prompt) :].tolist())
    stops = model.generation_config.eos_token_id
    stops = tuple(stops) if isinstance(stops, list) else (stops,)
    requests = [Request(prompt=prompt, group=i) for i, prompt in enumerate(asked)]
    found = engine_for(model, slots=3).generate(requests, Sampling(max_tokens=12, temperature=0.0, stop_ids=stops))
    for prompt, sample, tokens in zip(asked, found, expected, strict=True):
        assert sample.tokens[: len(prompt)].tolist() == prompt.tolist()
        assert sample.tokens[len(prompt) :].tolist() == tokens
        assert sample.mask.tolist() == [False] * len(prompt) + [True] * len(tokens)
        assert sample.finish == ("stop" if tokens[-1] in stops else "length")


SETTINGS = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.5},
    {"min_p": 0.2},
]


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "mistral", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logprobs_equal_a_teacher_forced_pass(name, settings):
    from posttrain import ops

    model = tiny_model(name).eval()
    engine = engine_for(model)
    requests = [Request(prompt=p, group=i, seed=i) for i, p in enumerate(prompts())]
    for sample in engine.generate(requests, Sampling(max_tokens=15, **settings)):
        hidden = engine.trunk.hidden(collate([sample])).last_hidden_state[0]
        logprobs = ops.tempered(engine.trunk.logits(hidden[:-1]), **settings).log_softmax(-1)
        expected = logprobs.gather(-1, torch.as_tensor(sample.tokens[1:]).long()[:, None])[:, 0].detach().numpy()
        assert np.abs(sample.logprobs[1:] - expected)[sample.mask[1:]].max() < 1e-5


def test_plain_sampling_agrees_with_the_trainer():
    model = tiny_model("qwen2").eval()
    engine = engine_for(model)
    samples = engine.generate([Request(prompt=p, seed=i) for i, p in enumerate(prompts())], Sampling(max_tokens=9))
    out = forward(engine.trunk, collate(samples), Wanted())
    theirs = np.concatenate([sample.logprobs for sample in samples])
    assert np.abs(out.logprobs.detach().numpy() - theirs).max() < 1e-5


def test_an_answer_does_not_depend_on_its_company():
    model = tiny_model("llama").eval()
    requests = [Request(prompt=p, group=i // 2, seed=100 + i) for i, p in enumerate(p for p in prompts() for _ in "ab")]
    sampling = Sampling(max_tokens=20, stop_ids=(2, 9, 17))
    together = engine_for(model, slots=5).generate(requests, sampling)
    for request, sample in zip(requests, together, strict=True):
        (alone,) = engine_for(model, slots=1).generate([request], sampling)
        assert alone.tokens.tolist() == sample.tokens.tolist()
    assert len({tuple(s.tokens[: len(r.prompt) + 4]) for r, s in zip(requests, together, strict=True)}) > 10
    assert {sample.finish for sample in together} == {"stop", "length"}


def test_samples_follow_the_distribution():
    model = tiny_model("llama").eval()
    prompt = prompts((6,))[0]
    engine = engine_for(model, slots=64)
    drawn = 4000
    samples = engine.generate([Request(prompt=prompt, seed=i) for i in range(drawn)], Sampling(max_tokens=1))
    counts = np.bincount([int(sample.tokens[-1]) for sample in samples], minlength=104)
    hidden = engine.trunk.hidden(collate([Sample(tokens=prompt, mask=np.zeros(6, dtype=bool))])).last_hidden_state[
        0, -1:
    ]
    expected = engine.trunk.logits(hidden).softmax(-1)[0].detach().numpy() * drawn
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 103 + 4 * (2 * 103) ** 0.5  # chi-square with 103 degrees of freedom, 4 standard deviations


def test_draws_are_even_and_independent():
    draws = uniforms(range(1000), [0] * 1000).numpy()
    along = uniforms([7] * 1000, range(1000)).numpy()
    for numbers in (draws, along):
        assert numbers.min() >= 0 and numbers.max() < 1
        assert np.histogram(numbers, 10, (0, 1))[0].min() > 65
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1
    assert uniforms([3], [5]) == uniforms([9, 3], [1, 5])[1]


def test_inverse_cdf_never_draws_what_has_no_probability():
    logprobs = torch.tensor([[-torch.inf, 0.5, -torch.inf, 0.5, -torch.inf]]).log_softmax(-1).repeat(4, 1)
    assert inverse_cdf(logprobs, torch.tensor([0.0, 0.499, 0.501, 1.0]).double()).tolist() == [1, 1, 3, 3]


def test_stop_text_and_streaming():
    model = tiny_model("llama").eval()
    engine = engine_for(model)
    heard = []
    requests = [Request(prompt=p, seed=i) for i, p in enumerate(prompts())]
    free = engine.generate(requests, Sampling(max_tokens=20), on_token=lambda i, token: heard.append((i, token)))
    for index, (request, sample) in enumerate(zip(requests, free, strict=True)):
        assert [token for i, token in heard if i == index] == sample.tokens[len(request.prompt) :].tolist()
    text = engine.tokenizer.decode(free[0].tokens[len(requests[0].prompt) :])
    stop = text[5:7]
    (stopped,) = engine.generate(requests[:1], Sampling(max_tokens=20, stop_texts=(stop,)))
    answer = engine.tokenizer.decode(stopped.tokens[len(requests[0].prompt) :])
    assert stopped.finish == "stop" and answer == text[: text.index(stop) + len(stop)]


def test_repetition_penalty_equals_transformers():
    model = tiny_model("llama").eval()
    prompt = prompts((9,))[0]
    ids = torch.as_tensor(prompt).long()[None]
    model.set_attn_implementation("eager")
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=10,
        do_sample=False,
        repetition_penalty=1.3,
        pad_token_id=0,
    )
    (sample,) = engine_for(model).generate(
        [Request(prompt=prompt)], Sampling(max_tokens=10, temperature=0.0, repetition_penalty=1.3, stop_ids=(2,))
    )
    assert sample.tokens.tolist() == out[0].tolist()
