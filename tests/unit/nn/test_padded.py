"""Models whose packed pass differs from their own run padded, with the numbers of their own code, however cut."""

import logging

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest, Loss, Objective, Sample, SamplingDistribution
from posttrain.data.packing import collate, pack_padded
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.own_code import OwnCodeGenerator
from posttrain.nn import forward as passes
from posttrain.nn.forward import ModelRunner, forward, verify_against_stock
from posttrain.train.learner import Learner
from tests.tiny import tiny_model, tiny_tokenizer

SPECIAL = {"vocab_size": 104, "hidden_size": 16, "bos_token_id": 1, "eos_token_id": 5, "pad_token_id": 0}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2, "mamba_dt_rank": 4}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 24}
MODELS = {
    "bloom": SPECIAL | {"n_layer": 2, "n_head": 2},
    "falcon": SPECIAL | {"num_hidden_layers": 2, "num_attention_heads": 2, "alibi": True},
    "jamba": SPECIAL | HEADS | MAMBA | EXPERTS | PERIODS,
    "mamba": SPECIAL | {"num_hidden_layers": 2, "state_size": 4},
    "lfm2": SPECIAL | HEADS | {"full_attn_idxs": [1]},
}


def tiny(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **MODELS[name]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return tiny(request.param)


@pytest.fixture(scope="module")
def runner(model):
    runner = ModelRunner.from_model(model)
    verify_against_stock(runner)
    return runner


def samples_of(*lengths):
    random = np.random.default_rng(1)
    return [
        Sample(tokens=random.integers(6, 104, length).astype(np.int32), mask=np.arange(length) > 1)
        for length in lengths
    ]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def stock_loss(model, samples):
    """The sum over samples of the loss that transformers computes."""
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.tokens).long()[None]
        labels = ids.where(torch.from_numpy(sample.mask)[None], torch.tensor(-100))
        total = total + model(input_ids=ids, labels=labels, use_cache=False).loss * int(sample.mask.sum())
    return total


def our_loss(runner, samples, cut):
    request, total = ForwardRequest(names=frozenset({"logprobs"})), torch.zeros(())
    for indices in pack_padded(samples, cut):
        batch = collate([samples[i] for i in indices])
        total = total - forward(runner, batch, request).logprobs[batch.counted].sum()
    return total


def test_loss_and_gradient_are_those_of_the_models_own_code_however_it_is_cut(model, runner):
    assert not runner.packed
    samples = samples_of(9, 4, 9, 6)
    expected = stock_loss(model, samples)
    wanted = gradients(model, expected)
    for cut in (9, 20, 100):
        found = our_loss(runner, samples, cut)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(model, found), wanted, rtol=1e-4, atol=1e-5)


def test_completions_have_the_log_probabilities_that_the_trainer_computes(runner):
    tokenizer = tiny_tokenizer()
    prompts = [sample.tokens for sample in samples_of(5, 3, 5)]
    requests = [GenerationRequest(prompt=prompt, group=n, seed=n) for n, prompt in enumerate(prompts)]
    engine = LocalEngine(runner, tokenizer)
    sampling = Sampling(max_tokens=4, temperature=0.8, top_k=20)
    together = engine.generate(requests, sampling)
    (alone,) = engine.generate(requests[1:2], sampling)
    assert together[1].tokens.tolist() == alone.tokens.tolist()
    batch = collate(together)
    distribution = SamplingDistribution(temperature=sampling.temperature, top_k=sampling.top_k)
    request = ForwardRequest(names=frozenset({"logprobs"}), distribution=distribution)
    with torch.no_grad():
        found = forward(runner, batch, request).logprobs[batch.counted]
    torch.testing.assert_close(found, batch.logprobs[batch.counted], rtol=1e-3, atol=1e-4)
    with pytest.raises(UsageError, match="takes no requests while others run"):
        engine.open_scheduler(16, 4, lambda active: None)


def test_it_samples_what_the_scheduler_samples():
    """On a model that both can run, with stops by token and by text."""
    runner, tokenizer = ModelRunner.from_model(tiny_model("llama")), tiny_tokenizer()
    verify_against_stock(runner)
    assert runner.packed
    requests = [GenerationRequest(prompt=sample.tokens, seed=n) for n, sample in enumerate(samples_of(5, 3, 5, 7))]
    sampling = Sampling(max_tokens=12, temperature=1.3, top_p=0.9, repetition_penalty=1.2, stop_texts=("a", "b", "c"))
    sampling_by_token = Sampling(max_tokens=12, stop_ids=tuple(range(50, 80)), min_p=0.01)
    for how in (sampling, sampling_by_token, Sampling(max_tokens=3, temperature=0.0)):
        expected = LocalEngine(runner, tokenizer).generate(requests, how)
        passes.use_own_attention(runner.model)
        found = OwnCodeGenerator(runner, tokenizer).generate(requests, how)
        passes.attention.use_packed(runner.model)
        for one, other in zip(found, expected, strict=True):
            assert (one.tokens.tolist(), one.finish) == (other.tokens.tolist(), other.finish)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_the_log_says_it_once(caplog):
    passes.announced.clear()
    with caplog.at_level(logging.WARNING, "posttrain"):
        for _ in range(2):
            verify_against_stock(ModelRunner.from_model(tiny("bloom")))
    assert [record.message for record in caplog.records if record.name == "posttrain"] == [
        "BloomForCausalLM: a packed pass differs from its own, so it runs unpacked, with padding, by its own code."
    ]


def test_padding_counts_in_the_size_of_micro_batches():
    samples = samples_of(8, 2, 8, 3, 2, 8)
    assert pack_padded(samples, 16) == [[0, 2], [3, 5], [1, 4]]
    assert pack_padded(samples, 4) == [[0], [2], [5], [3], [1, 4]]
    assert pack_padded(samples, 16, group_size=2) == [[0, 1], [2, 3], [4, 5]]


def test_a_learner_trains_it_and_micro_batches_do_not_matter(tmp_path):
    tiny("jamba").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    samples = samples_of(9, 4, 6)

    def negative(out, batch):
        return Loss(total=-out.logprobs[batch.counted].sum(), metrics={})

    objective = Objective(
        request=ForwardRequest(names=frozenset({"logprobs"}), router_loss=0.1), loss=negative, unit="token"
    )
    found = []
    for tokens in (9, 100):
        config = TrainConfig(micro_batch_tokens=tokens)
        learner = Learner(ModelConfig(path=str(tmp_path), router_aux_loss_coef=0.1), config)
        sums = learner.forward_backward(samples, objective, 12, sum(map(len, samples)))
        norm = learner.step(1e-3)["grad_norm"]
        found.append((sums["loss"][0], norm))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
