"""Beam search against an exhaustive search."""

import numpy as np
import pytest
import torch

from posttrain.core.types import ForwardRequest as Wanted
from posttrain.core.types import Sample
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.beam_search import BeamEngine
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = np.array([9, 20, 31], dtype=np.int32)


@pytest.fixture(params=["llama", "qwen2", "gemma2"])
def runner(request):
    model = tiny_model(request.param).eval()
    model.set_attn_implementation(attention.NAME)
    return ModelRunner.from_model(model)


def engine_for(runner, beams):
    def logprobs(samples, *, distribution):
        with torch.no_grad():
            out = forward(runner, collate(samples), Wanted(distribution=distribution)).logprobs
        return [part.numpy() for part in out.split([len(sample) for sample in samples])]

    return BeamEngine(runner, tiny_tokenizer(), beams, logprobs)


def test_as_many_beams_as_tokens_find_the_most_likely_completions(runner):
    words = runner.vocabulary_size
    pairs = [(first, second) for first in range(words) for second in range(words)]
    tokens = np.array([[*PROMPT, *pair] for pair in pairs], dtype=np.int32)
    mask = np.array([False] * len(PROMPT) + [True] * 2)
    with torch.no_grad():
        out = forward(runner, collate([Sample(tokens=row, mask=mask) for row in tokens]), Wanted()).logprobs
    sums = out.view(len(pairs), -1).sum(1).numpy()
    best = [pairs[place] for place in np.argsort(-sums)[:3]]
    requests = [GenerationRequest(prompt=PROMPT, group=7, seed=seed) for seed in range(3)]
    found = engine_for(runner, words).generate(requests, Sampling(max_tokens=2, temperature=0.0))
    assert [tuple(sample.tokens[len(PROMPT) :]) for sample in found] == best
    for sample, total in zip(found, sorted(sums)[::-1], strict=False):
        assert sample.logprobs.sum() == pytest.approx(total, abs=1e-5)
        assert sample.mask.tolist() == mask.tolist() and (sample.group, sample.finish) == (7, "length")
    assert runner.model.config._attn_implementation == attention.NAME, "training goes on with ours"


def test_completions_end_at_a_stop_token(runner):
    asked = Sampling(max_tokens=6, temperature=0.0)
    (longest,) = engine_for(runner, 2).generate([GenerationRequest(prompt=PROMPT)], asked)
    stop = int(longest.tokens[len(PROMPT) + 1])
    (sample,) = engine_for(runner, 2).generate(
        [GenerationRequest(prompt=PROMPT)], Sampling(**vars_of(asked), stop_ids=(stop,))
    )
    answer = sample.tokens[len(PROMPT) :].tolist()
    assert (stop in answer) == (sample.finish == "stop") and stop not in answer[:-1]


def vars_of(sampling):
    return {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}


def test_drawn_beams_follow_the_seed(runner):
    def drawn(seed):
        found = engine_for(runner, 3).generate(
            [GenerationRequest(prompt=PROMPT, seed=seed)] * 2, Sampling(max_tokens=5, temperature=1.5, top_k=50)
        )
        return [sample.tokens.tolist() for sample in found]

    state = torch.get_rng_state()
    assert drawn(1) == drawn(1)
    assert len({str(drawn(seed)) for seed in range(5)}) > 1
    assert torch.equal(state, torch.get_rng_state())
