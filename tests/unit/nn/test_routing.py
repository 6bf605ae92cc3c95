"""Experts that the engine records are those it used, and training uses them where it is asked to."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.cluster import messages
from posttrain.core.types import ForwardRequest, Sample
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.routing import expert_weights, routers_of
from tests.tiny import MIXTURES, tiny_model, tiny_tokenizer

SAMPLING = Sampling(max_tokens=10)


def requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, 60, n).astype(np.int32) for n in (3, 20, 7)]
    return [GenerationRequest(prompt=prompts[i // 3], group=i // 3, seed=i, reuse_prefix=True) for i in range(9)]


def runner_of(name: str) -> ModelRunner:
    model = tiny_model(name)
    model.set_attn_implementation(attention.NAME)
    return ModelRunner.from_model(model)


def engine_of(runner: ModelRunner, **options) -> LocalEngine:
    return LocalEngine(runner, tiny_tokenizer(), record_experts=True, **options)


@pytest.fixture(scope="module", params=MIXTURES)
def sampled(request) -> tuple[ModelRunner, list[Sample]]:
    runner = runner_of(request.param)
    return runner, engine_of(runner).generate(requests(), SAMPLING)


def used_experts(runner: ModelRunner, work) -> tuple[list[np.ndarray], object]:
    """What the layers' experts are called with, layer by layer, sorted; and the result of `work`."""
    used: list[np.ndarray] = []
    layers = [layer for layer in runner.model.model.layers if hasattr(layer.mlp, "experts")]
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _module, args: used.append(args[1].sort(1).values.numpy()))
        for layer in layers
    ]
    result = work()
    for hook in hooks:
        hook.remove()
    return used, result


def run(runner: ModelRunner, samples: list[Sample], experts: str, shared: int = 0):
    request = ForwardRequest(names=frozenset({"logprobs"}), experts=experts)
    return forward(runner, collate(samples, "cpu", shared), request)


def recorded(samples: list[Sample]) -> np.ndarray:
    return np.concatenate([sample.experts for sample in samples])


def test_no_token_is_routed_differently(sampled) -> None:
    """Experts, computed with the recorded ones and without them, are those of the sampler; so are log-probabilities."""
    runner, samples = sampled
    experts = recorded(samples)
    known = experts[:, 0, 0] >= 0
    last = np.cumsum([len(sample) for sample in samples]) - 1
    assert (~known).nonzero()[0].tolist() == last.tolist(), "only the last token of a sample was not computed"
    assert experts.shape[1] == len(routers_of(runner.model)) and (experts[known] >= 0).all()
    for use in ("compare", "replay"):
        used, out = used_experts(runner, lambda use=use: run(runner, samples, use))
        assert len(used) == experts.shape[1]
        for layer, chosen in enumerate(used):
            assert (chosen[known] == np.sort(experts[known, layer], 1)).all()
        assert out.rerouted.sum() == 0
        expected = np.concatenate([sample.logprobs for sample in samples])
        assert np.abs(out.logprobs.detach().numpy() - expected).max() < 1e-5


def change_experts(samples: list[Sample], count: int) -> list[Sample]:
    """Give the token before the last of every sample other experts than the router would choose."""
    changed = []
    for sample in samples:
        experts = sample.experts.copy()
        others = [e for e in range(count) if e not in experts[-2, 0]]
        experts[-2, 0] = (others + experts[-2, 0].tolist())[: experts.shape[2]]
        changed.append(replace(sample, experts=experts))
    return changed


def test_recorded_experts_are_used_and_others_are_counted(sampled) -> None:
    runner, samples = sampled
    changed = change_experts(samples, routers_of(runner.model)[0].num_experts)
    experts = recorded(changed)
    known = experts[:, 0, 0] >= 0
    own, compared = used_experts(runner, lambda: run(runner, changed, "compare"))
    used, replayed = used_experts(runner, lambda: run(runner, changed, "replay"))
    assert (used[0][known] == np.sort(experts[known, 0], 1)).all() and not (own[0] == used[0]).all()
    first = np.cumsum([0, *[len(sample) for sample in changed]])
    wanted = np.zeros(first[-1])
    wanted[first[1:] - 1] = 1  # the last token is predicted from the changed one
    assert (compared.rerouted.numpy() == wanted).all()
    ignored = run(runner, changed, "ignore")
    assert ignored.rerouted is None and torch.equal(ignored.logprobs, compared.logprobs)
    assert not torch.equal(replayed.logprobs, compared.logprobs)
    replayed.logprobs.sum().backward()
    gradients = [router.weight.grad.clone() for router in routers_of(runner.model)]
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    runner.model.zero_grad()
    run(runner, changed, "replay", shared=2).logprobs.sum().backward()
    for router, expected in zip(routers_of(runner.model), gradients, strict=True):
        assert torch.allclose(router.weight.grad, expected, atol=1e-4 * float(expected.abs().max()))
    runner.model.zero_grad()


def test_weights_are_the_routers_own(sampled) -> None:
    """Bit for bit, so that the same choice is the same pass."""
    runner, _ = sampled
    for router in routers_of(runner.model):
        logits, weights, chosen = router(torch.randn(50, router.hidden_dim))
        assert torch.equal(expert_weights(router, logits, chosen), weights)


def test_layers_that_are_recomputed_choose_the_same_experts() -> None:
    runner = runner_of("qwen3_moe")
    samples = change_experts(engine_of(runner).generate(requests(), SAMPLING), 6)
    again = ModelRunner.from_model(copy.deepcopy(runner.model))
    again.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again.model.train()
    for each in (runner, again):
        run(each, samples, "replay").logprobs.sum().backward()
    for a, b in zip(runner.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_preemption_and_reused_prefixes_keep_the_record() -> None:
    runner = runner_of("mixtral")
    expected = engine_of(runner).generate(requests(), SAMPLING)
    small = engine_of(runner, block_size=4, cache_blocks=12, frozen=True)
    for _ in range(2):
        found = small.generate(requests(), SAMPLING)
        for a, b in zip(found, expected, strict=True):
            assert (a.tokens == b.tokens).all() and (a.experts == b.experts).all()
    assert small.preemptions and any(sample.reused for sample in found)


def test_experts_travel_between_processes() -> None:
    experts = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    plain = Sample(tokens=np.arange(4, dtype=np.int32), mask=np.arange(4) > 0)
    buffers: messages.Buffers = []
    packed = messages.pack([plain, replace(plain, experts=experts)], buffers)
    found = messages.unpack(packed, buffers)
    assert found[0].experts is None and (found[1].experts == experts).all()
