"""vLLM beside a learner: it has the newest weights; with adapters only those are sent."""

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError
from posttrain.engines.base import EngineSpec, GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.vllm.replica import VllmReplica
from posttrain.models.saving import save_model
from posttrain.train.learner import Learner
from tests.tiny import tiny_folder

HEADS = {"hidden_size": 128, "intermediate_size": 96}
ASKED = [GenerationRequest(prompt=np.arange(8, 8 + n, dtype=np.int32), seed=n) for n in (3, 9, 14)]


def replica_of(learner):
    parts = (learner.model, learner.tokenizer, torch.float32, learner.weights, learner.logprobs)
    return VllmReplica({"max_num_seqs": 8}, *parts)


def move(learner):
    with torch.no_grad():
        for parameter in learner.parameters().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)


def agree(learner, replica):
    samples = replica.generate(ASKED, Sampling(max_tokens=12))
    pairs = zip(samples, learner.logprobs(samples), strict=True)
    return max(np.abs(sample.logprobs - logprobs).max() for sample, logprobs in pairs) < 2e-4


@pytest.mark.parametrize("kind", ["whole", "adapters", "adapters on adapters"])
def test_it_has_the_weights_of_the_last_refresh(kind, tmp_path):
    path = str(tiny_folder("qwen2", tmp_path, **HEADS))
    if kind == "adapters on adapters":
        first = Learner(ModelConfig(path=path, lora_rank=4), TrainConfig())
        move(first)
        path = str(tmp_path / "first")
        save_model(first.model, first.tokenizer, tmp_path / "first")
    learner = Learner(ModelConfig(path=path, lora_rank=0 if kind == "whole" else 4), TrainConfig())
    replica = replica_of(learner)
    assert bool(replica.base) == (kind == "adapters")
    assert not replica.has_weights
    replica.refresh(0)
    assert agree(learner, replica)
    for version in (1, 2):
        move(learner)
        assert not agree(learner, replica)
        replica.refresh(version)
        assert agree(learner, replica)


def test_an_update_that_goes_wrong_is_an_error(tmp_path):
    learner = Learner(ModelConfig(path=str(tiny_folder("llama", tmp_path, **HEADS))), TrainConfig())
    replica = replica_of(learner)
    replica.weights = lambda: ((name, tensor * 0.9) for name, tensor in learner.weights())
    with pytest.raises(PosttrainError, match="differ from the trainer's"):
        replica.refresh(0)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_learner_generates_with_the_weights_it_is_asked_for(ahead, tmp_path):
    model = ModelConfig(path=str(tiny_folder("llama", tmp_path, **HEADS)))
    learner = Learner(model, TrainConfig(), sampler_copy=ahead, engine=EngineSpec("vllm", {"max_num_seqs": 8}))
    local = LocalEngine(learner.runner, learner.tokenizer)
    sampling = Sampling(max_tokens=12, temperature=0.0)

    def tokens(samples):
        return [sample.tokens.tolist() for sample in samples]

    learner.update_generator(0)
    old = tokens(local.generate(ASKED, sampling))
    assert tokens(learner.generate(ASKED, sampling)) == old
    move(learner)
    new = tokens(local.generate(ASKED, sampling))
    assert new != old
    assert tokens(learner.generate(ASKED, sampling)) == old
    assert tokens(learner.generate(ASKED, sampling, current=True)) == new
    if ahead:  # a batch in the making keeps the weights it was begun with
        assert tokens(learner.generate(ASKED, sampling)) == old
    learner.update_generator(1)
    assert tokens(learner.generate(ASKED, sampling)) == new
