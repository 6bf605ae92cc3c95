"""New weights while vLLM generates: each token is recorded with the version that sampled it."""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.weight_probe import probe_sample
from posttrain.train.learner import Learner
from tests.tiny import tiny_folder

HEADS = {"hidden_size": 128, "intermediate_size": 96}
STEPS = 10  # before the weights change
ASKED = [GenerationRequest(prompt=np.arange(3, 3 + n, dtype=np.int32), seed=n) for n in (40, 45, 7)]
SAMPLING = Sampling(max_tokens=24)


def changed(parameters):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_active_requests_continue_with_new_weights(tmp_path):
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path, **HEADS)))
    learner, old = Learner(model, TrainConfig()), Learner(model, TrainConfig())
    # Two at a time: the third begins when one of the others has ended.
    engine = VllmEngine(
        learner.model.config, learner.tokenizer, {"max_num_seqs": 2, "block_size": 32, "async_scheduling": False}
    )
    engine.load(learner.weights(), 1)
    looked_at = [probe_sample(learner.model.config.vocab_size)]
    calls = iter(range(1000))

    def between_steps():
        if next(calls) == STEPS:
            layer = learner.model.model.layers[-1]  # keys and values, which stay, are the same by both weights
            changed([layer.mlp.down_proj.weight, learner.model.lm_head.weight])
            engine.load(learner.weights(), 2)
            engine.check(looked_at, learner.logprobs(looked_at), 0.001)  # makes steps of its own
        return engine.version

    samples = engine.generate(ASKED, SAMPLING, between_steps=between_steps)
    assert [(sample.version, sample.newest) for sample in samples] == [(1, 2), (1, 2), (2, 2)]
    by_old, by_new = old.logprobs(samples), learner.logprobs(samples)
    for sample, was, now, before in zip(samples, by_old, by_new, (STEPS, STEPS, 0), strict=True):
        first, rest = np.split(np.flatnonzero(sample.mask), [before])
        assert len(rest) == SAMPLING.max_tokens - before
        np.testing.assert_allclose(sample.logprobs[first], was[first], atol=2e-4)
        np.testing.assert_allclose(sample.logprobs[rest], now[rest], atol=2e-4)
        assert np.abs(was - now)[sample.mask].mean() > 0.05

    # What was computed of the prompts with weights of before is not used again.
    calls = iter(range(1000))

    def all_of_them():
        if next(calls) == STEPS:
            changed(learner.model.parameters())
            engine.load(learner.weights(), 3)
        return engine.version

    engine.generate(ASKED, SAMPLING, between_steps=all_of_them)
    samples = engine.generate(ASKED, SAMPLING)
    for sample, now in zip(samples, learner.logprobs(samples), strict=True):
        assert (sample.version, sample.newest) == (3, 3)
        np.testing.assert_allclose(sample.logprobs, now, atol=2e-4)
