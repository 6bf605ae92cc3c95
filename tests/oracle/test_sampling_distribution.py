"""Log-probabilities of what is really drawn from: temperature, top_k, top_p and min_p, singly and together."""

import math

import numpy as np
import pytest
import torch

from posttrain.core import ops
from posttrain.core.types import ForwardRequest, SamplingDistribution
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.nn import attention
from posttrain.nn import logprobs as chunked
from posttrain.nn.forward import ModelRunner, forward
from tests.tiny import tiny_model, tiny_tokenizer

from . import slow

ROWS, WORDS = 9, 7

DISTRIBUTIONS = [
    SamplingDistribution(),
    SamplingDistribution(temperature=0.6),
    SamplingDistribution(temperature=1.7),
    SamplingDistribution(top_k=3),
    SamplingDistribution(top_k=1),
    SamplingDistribution(top_k=50),
    SamplingDistribution(top_p=0.8),
    SamplingDistribution(top_p=0.01),
    SamplingDistribution(min_p=0.2),
    SamplingDistribution(min_p=1.0),
    SamplingDistribution(temperature=0.8, top_p=0.9, top_k=5, min_p=0.05),
    SamplingDistribution(temperature=2.0, top_p=0.7, top_k=6, min_p=0.3),
    SamplingDistribution(temperature=1.5, top_p=0.8, min_p=0.2, min_p_first=True),  # as vLLM does
    SamplingDistribution(temperature=0.8, top_p=0.9, top_k=5, min_p=0.05, min_p_first=True),
]


def kept_words(row, distribution):
    """Indices that can be drawn: one test after the other, each on the renormalised rest, top_logprobs first."""
    weights = {word: math.exp(x / distribution.temperature) for word, x in enumerate(row)}
    order = sorted(weights, key=lambda word: -weights[word])
    if distribution.min_p_first:
        order = [word for word in order if weights[word] >= distribution.min_p * weights[order[0]] * (1 - 1e-12)]
    if distribution.top_k:
        order = order[: distribution.top_k]
    total, passed, left = sum(weights[word] for word in order), 0.0, []
    for word in order:
        if passed < distribution.top_p:
            left.append(word)
        passed += weights[word] / total
    best = weights[left[0]]
    return [word for word in left if weights[word] >= distribution.min_p * best * (1 - 1e-12)]


def probabilities(row, kept, temperature):
    total = sum(math.exp(row[word] / temperature) for word in kept)
    return {word: math.exp(row[word] / temperature) / total for word in kept}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_against_a_slow_loop(distribution, seed, monkeypatch):
    """Half of the targets may lie outside of what would be drawn now; they stay finite."""
    monkeypatch.setattr(chunked, "LOGITS_PER_CHUNK", 2 * WORDS)
    rng = np.random.default_rng(seed)
    logits = torch.tensor(rng.normal(0, 2, (ROWS, WORDS))).requires_grad_()
    targets = rng.integers(0, WORDS, ROWS).tolist()
    logprobs, entropy = chunked.token_logprobs(
        logits, torch.tensor(targets), lambda x: x, WORDS, distribution, entropy_gradient=True
    )
    rows = logits.tolist()
    kept = [sorted({*kept_words(row, distribution), target}) for row, target in zip(rows, targets, strict=True)]
    upstream = rng.normal(0, 1, (2, ROWS))

    def slow_logprobs(values):
        both = zip(values, kept, targets, strict=True)
        return [math.log(probabilities(row, words, distribution.temperature)[target]) for row, words, target in both]

    def slow_entropy(values):
        drawn = [probabilities(row, words, distribution.temperature) for row, words in zip(values, kept, strict=True)]
        return [-sum(p * math.log(p) for p in one.values()) for one in drawn]

    assert logprobs.tolist() == pytest.approx(slow_logprobs(rows), rel=1e-9, abs=1e-12)
    assert entropy.tolist() == pytest.approx(slow_entropy(rows), rel=1e-9, abs=1e-12)

    def formula(values):
        return float(upstream[0] @ slow_logprobs(values) + upstream[1] @ slow_entropy(values))

    (torch.tensor(upstream) * torch.stack([logprobs, entropy])).sum().backward()
    where = [(i, j) for i in range(ROWS) for j in range(WORDS)]
    expected = slow.gradient(formula, rows, where)
    for i, j in where:
        assert logits.grad[i, j].item() == pytest.approx(expected[i, j], rel=1e-7, abs=1e-8)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=str)
def test_what_can_be_drawn_and_how_likely(distribution):
    rng = np.random.default_rng(5)
    logits = torch.tensor(rng.normal(0, 2, (40, WORDS)))
    truncation = distribution.top_k, distribution.top_p, distribution.min_p, distribution.min_p_first
    found = ops.tempered(logits, distribution.temperature, *truncation).softmax(-1)
    for row, drawn in zip(logits.tolist(), found.tolist(), strict=True):
        expected = probabilities(row, kept_words(row, distribution), distribution.temperature)
        assert drawn == pytest.approx([expected.get(word, 0.0) for word in range(WORDS)], abs=1e-12)


@pytest.mark.parametrize(
    "distribution",
    [SamplingDistribution(top_k=2), SamplingDistribution(top_p=0.5), SamplingDistribution(min_p=1.0)],
    ids=str,
)
def test_equally_likely_tokens_stay_or_go_together(distribution):
    """In bfloat16 ties are common; sampler and trainer must not break them differently."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    kept = ops.tempered(logits, 1.0, distribution.top_k, distribution.top_p, distribution.min_p).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]
    for target in (1, 2, 3):
        logprobs, _ = chunked.token_logprobs(logits, torch.tensor([target]), lambda x: x, 5, distribution)
        assert logprobs.item() == pytest.approx(-math.log(3))


def test_no_position_at_all():
    distribution = SamplingDistribution(temperature=0.8, top_p=0.9, top_k=3, min_p=0.1)
    hidden = torch.zeros(0, WORDS, requires_grad=True)
    logprobs, entropy = chunked.token_logprobs(
        hidden, torch.zeros(0, dtype=torch.long), lambda x: x, WORDS, distribution, True
    )
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize(
    "distribution",
    [
        SamplingDistribution(),
        SamplingDistribution(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01),
        SamplingDistribution(temperature=1.5, top_k=7),
        SamplingDistribution(top_p=0.6),
        SamplingDistribution(min_p=0.3),
    ],
    ids=str,
)
def test_at_equal_weights_the_trainer_agrees_with_the_engine(name, distribution):
    model = tiny_model(name)
    model.set_attn_implementation(attention.NAME)
    runner = ModelRunner.from_model(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, n).astype(np.int32) for n in (5, 11, 3, 20)]
    sampling = Sampling(
        max_tokens=16,
        temperature=distribution.temperature,
        top_p=distribution.top_p,
        top_k=distribution.top_k,
        min_p=distribution.min_p,
    )
    requests = [GenerationRequest(prompt=prompt, seed=i) for i, prompt in enumerate(prompts)]
    samples = LocalEngine(runner, tiny_tokenizer(), slots=3).generate(requests, sampling)
    batch = collate(samples)
    wanted = ForwardRequest(names=frozenset({"logprobs", "entropy"}), distribution=distribution)
    with torch.no_grad():
        out = forward(runner, batch, wanted)
    ratio = (out.logprobs - batch.logprobs)[batch.counted].exp()
    assert len(ratio) == 64 and float((ratio - 1).abs().max()) < 1e-5
    assert (out.entropy[batch.counted] >= -1e-6).all()


def test_the_order_of_truncation_matters():
    """Otherwise sampler and trainer of vLLM would agree by chance."""
    logits = torch.tensor([[2.0, 1.5, 1.0, -3.0]])
    last, first = (ops.tempered(logits, 1.0, 0, 0.8125, 0.3, order).isfinite().sum().item() for order in (False, True))
    assert (last, first) == (3, 2)
