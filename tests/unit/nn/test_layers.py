"""The fat steps of decoder layers give what the models' own code gives, forward and backward."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from posttrain.config.sections import ModelConfig
from posttrain.core.types import ForwardRequest, MicroBatch, Sample, SamplingDistribution
from posttrain.data.packing import collate
from posttrain.models import adapters
from posttrain.nn import attention, layers, lm_head, lora, routing, weights
from posttrain.nn.forward import ModelRunner, forward, verify_against_stock
from posttrain.nn.kernels import reference
from posttrain.nn.optimizer import accumulate_into
from posttrain.nn.routing import observe_routers

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED = {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}  # the first layer is dense
LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
MIXTURES = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 5, "sliding_window": 5}),
    "qwen2-moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, EXPERTS | SHARED),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe, some layers dense": (Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS | {"mlp_only_layers": [1]}),
    "deepseek-v2": (DeepseekV2ForCausalLM, DeepseekV2Config, LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek-v2, queries without latents": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek-v3": (DeepseekV3ForCausalLM, DeepseekV3Config, LATENT),
    "deepseek-v3, halves rotated, biases": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        LATENT | {"rope_interleave": False, "attention_bias": True},
    ),
}
FAMILIES |= MIXTURES
VOCABULARY = 97


def model_of(family: str, **more):
    model_class, config_class, options = FAMILIES[family]
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | options | more)))
    for parameter in model.parameters():  # norms and biases would not show an error at 1 and 0
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.config.use_cache = False
    model.set_attn_implementation(attention.NAME)
    return model


def some_samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    rows = [np.concatenate([np.arange(6), rng.integers(0, VOCABULARY, more)]) for more in (5, 9, 3)]
    return [Sample(tokens=row.astype(np.int32), mask=np.arange(len(row)) >= 1) for row in rows]


def gradients(
    model, device: str = "cpu", *, by: object = None, shared: int = 0, router_loss: float = 0.0, samples=None
) -> dict[str, torch.Tensor]:
    """Of a loss that uses log-probabilities and entropies; `by` the steps of a module, or the model's own code.

    With `router_loss`, of the load-balancing loss instead. Experts that `samples` record are used.
    """
    model = copy.deepcopy(model).to(device)
    runner = ModelRunner(model, attention.supports_varlen_kernel(model))  # without a plain head
    observe_routers(model)
    if by is not None:
        assert layers.use_fused_layers(model, by)
        runner.fused_head = lm_head.FusedHead.from_model(model, by)
        assert runner.fused_head is not None
    verify_against_stock(runner)
    loss = loss_of(runner, collate(samples or some_samples(), torch.device(device), shared), router_loss)
    loss.backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach().float().cpu()}


def routed_samples(model) -> list[Sample]:
    """The samples with the experts that the model chooses."""
    model, samples, chosen = copy.deepcopy(model), some_samples(), []
    for router in routing.routers_of(model):
        router.register_forward_hook(lambda _router, _args, output: chosen.append(output[2].numpy().astype(np.int16)))
    with torch.no_grad():
        loss_of(ModelRunner(model, varlen_kernel=False), collate(samples))
    if chosen:
        parts = np.split(np.stack(chosen, 1), np.cumsum(list(map(len, samples)))[:-1])
        samples = [replace(sample, experts=part) for sample, part in zip(samples, parts, strict=True)]
    return samples


def loss_of(runner: ModelRunner, batch: MicroBatch, router_loss: float = 0.0) -> torch.Tensor:
    names, distribution = frozenset({"logprobs", "entropy"}), SamplingDistribution(temperature=0.7)
    request = ForwardRequest(
        names=names, distribution=distribution, entropy_gradient=True, router_loss=router_loss, experts="replay"
    )
    out = forward(runner, batch, request)
    if router_loss:
        return router_loss * out.router_loss
    return (out.logprobs * torch.arange(len(batch.tokens)).to(out.logprobs)).sum() + out.entropy.square().sum()


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(lm_head, "LOGITS_PER_CHUNK", 5 * VOCABULARY)
    monkeypatch.setattr(lm_head, "LOGITS_PER_CPU_CHUNK", 5 * VOCABULARY)


@pytest.mark.parametrize("shared", [0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_models_own(family: str, shared: int) -> None:
    model = model_of(family)
    assert largest_error(gradients(model, by=reference, shared=shared), gradients(model)) < 3e-6


@pytest.mark.parametrize("family", MIXTURES)
def test_the_load_balancing_loss_equals_the_models_own(family: str) -> None:
    model = model_of(family)
    found = gradients(model, by=reference, router_loss=10.0)
    assert any(name.endswith("gate.weight") for name in found)
    assert largest_error(found, gradients(model, router_loss=10.0)) < 3e-6


def adapted_model(family: str, **options):
    """Return a model whose adapters change its outputs."""
    model = model_of(family)
    adapters.add_adapters(model, ModelConfig(lora_rank=4, **options), "token")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj", "up_proj")])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2-moe", "mixtral", "deepseek-v3"])
def test_loss_and_gradients_with_adapters_equal_the_models_own(family: str, targets: tuple[str, ...]) -> None:
    if family in MIXTURES and targets != ("all-linear",):
        targets = ("q_a_proj", "kv_b_proj") if "deepseek" in family else ("q_proj", "v_proj")
    model = adapted_model(family, lora_target_modules=targets)
    found = gradients(model, by=reference)
    assert any("lora_A" in name for name in found)
    assert not any(name.endswith("base_layer.weight") for name in found)
    assert largest_error(found, gradients(model)) < 3e-6


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj", "up_proj")])
@pytest.mark.parametrize("family", ["qwen2", "llama with biases"])
def test_joined_adapters_give_what_the_modules_give(family: str, targets: tuple[str, ...]) -> None:
    """Also after an update in place, and training then still computes the layers' gradients."""
    model = adapted_model(family, lora_target_modules=targets).requires_grad_(False)
    own, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    x = torch.randn(7, model.config.hidden_size)
    qkv, gate_up = [own.q_proj, own.k_proj, own.v_proj], [mlp.gate_proj, mlp.up_proj]
    joined = lora.JoinedAdapters(qkv, reference), lora.JoinedAdapters(gate_up, reference)
    for _ in range(2):
        expected = torch.cat([module(x) for module in qkv], 1)
        torch.testing.assert_close(joined[0](x), expected)
        expected = mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)
        torch.testing.assert_close(joined[1](x, gated=True), expected)
        for parameter in model.parameters():
            parameter.mul_(1.1)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    layers.use_fused_layers(model, reference)
    lora.JoinedAdapters(qkv, reference)
    moved = [name for (name, p), was in zip(model.named_parameters(), addresses, strict=True) if p.data_ptr() != was]
    assert not [name for name in moved if "layers.0" in name and ("self_attn.o" not in name and "down" not in name)]


def test_which_adapters_the_fused_layers_compute(monkeypatch) -> None:
    """Others, such as those with dropout in training, keep their own code; what is switched off adds nothing."""
    calls = []
    real = lora.adapted_linear
    monkeypatch.setattr(lora, "adapted_linear", lambda *given: (calls.append(1), real(*given))[1])
    gradients(adapted_model("qwen2"), by=reference)
    assert calls, "simple adapters are computed together"
    model = adapted_model("qwen2", lora_dropout=0.5)
    module = model.model.layers[0].self_attn.q_proj
    assert lora.base_linear(module.train()) is None
    assert lora.base_linear(module.eval()) is module.base_layer and lora.adapter_of(module) is not None
    module.enable_adapters(False)
    assert lora.adapter_of(module) is None
    module.base_layer.weight.requires_grad_(True)
    assert lora.base_linear(module) is None, "the gradient of the base weight is the own code's"
    dora = model_of("qwen2")
    inject_adapter_in_model(LoraConfig(r=4, use_dora=True, target_modules=["q_proj"]), dora)
    assert lora.base_linear(dora.model.layers[0].self_attn.q_proj) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_go_to_the_masters_where_there_are_some(family: str) -> None:
    """Twice, as for two micro-batches: gradients accumulate there, also those that autograd computes."""
    model = model_of(family)
    expected = gradients(model)
    layers.use_fused_layers(model, reference)
    runner = ModelRunner(model, varlen_kernel=False, fused_head=lm_head.FusedHead.from_model(model, reference))
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        setattr(parameter, weights.MASTER, masters[name])
        parameter.register_post_accumulate_grad_hook(accumulate_into(masters[name]))
    for _ in range(2):
        loss_of(runner, collate(some_samples(), torch.device("cpu"))).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    found = {name: master.grad / 2 for name, master in masters.items()} | {"loss": expected["loss"]}
    assert largest_error(found, expected) < 3e-6


def test_recomputed_activations_change_nothing() -> None:
    model = model_of("qwen2")
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    assert largest_error(gradients(model, by=reference), expected) < 3e-6


def test_weights_that_lie_in_a_row_are_the_modules_own() -> None:
    model = model_of("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers.use_fused_layers(model, reference)
    own = model.model.layers[0].self_attn
    joined = weights.joined_view([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
    assert joined is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        own.k_proj.weight.fill_(7.0)
    assert (joined[len(own.q_proj.weight) :][: len(own.k_proj.weight)] == 7.0).all()
    assert weights.joined_view([own.k_proj.weight, own.q_proj.weight]) is None


def test_gradients_of_gathered_keys_go_back_to_where_they_came_from() -> None:
    keys = torch.tensor([0, 1, 2, 0, 1, 3, 0, 1, 4, 5])
    stream = torch.randn(6, 2, 3, requires_grad=True)
    gradient = torch.randn(10, 2, 3)
    (expected,) = torch.autograd.grad(stream[keys], stream, gradient)
    found = reference.gather_backward(gradient, *attention.index_uses(keys, 6))
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_head_with_something_behind_it_is_left_alone() -> None:
    model = model_of("llama")
    assert lm_head.FusedHead.from_model(model) is not None
    model.config.logit_scale = 0.5
    assert lm_head.FusedHead.from_model(model) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_no_less_exact_than_the_models_own_code(family: str, shared: int) -> None:
    """Both in half precision on the device, against float32; experts as in float32, since one other one is no error."""
    from posttrain.nn.kernels import triton

    model = model_of(family)
    samples = routed_samples(model)
    exact = gradients(model)
    half = model.to(torch.bfloat16)
    stock = gradients(half, "cuda", samples=samples)
    fast = gradients(half, "cuda", by=triton, shared=shared, samples=samples)
    assert largest_error(fast, exact) < 1.5 * largest_error(stock, exact)


def low_rank_cases(drawn):
    """Adapters on three layers, the second without one, and on gate and up; one adapter, and five mixed."""
    rows, depth, rank, adapters = 300, 1500, 24, 5
    x, mixed = drawn(rows, depth), torch.arange(rows, device="cuda") * 7 % adapters
    sizes, gate_up = [320, 64, 40], [200, 200]
    a, b = drawn(adapters, 3 * rank, depth) / depth**0.5, drawn(adapters, sum(sizes), rank) / rank**0.5
    base = drawn(rows, sum(sizes) + 3 * rank)  # as one product leaves it: the adapters' columns behind the outputs

    def of(by, gated, grouped):
        layers = gate_up if gated else sizes
        adapted = [True, False, True] if not gated and not grouped else [True] * len(layers)
        parts, width = reference.LowRankParts(layers, adapted, rank), sum(layers)
        if not grouped:
            return (by.add_low_rank(base[:, :width], base[:, sum(sizes) :], b[:1], parts, 0.5, gated=gated),)
        sorted_rows = by.rows_by_adapter(mixed, adapters)
        inner = by.low_rank_inner(x, a[:, : len(layers) * rank], sorted_rows)
        return (by.add_low_rank(base[:, :width], inner, b, parts, 1.0, sorted_rows, gated=gated),)

    return {
        f"low rank, gated {gated}, several adapters {grouped}": partial(of, gated=gated, grouped=grouped)
        for gated in (False, True)
        for grouped in (False, True)
    }


def expert_cases(drawn) -> dict:
    """The functions for experts; one of the 12 gets no token, and the sizes are not multiples of a block."""
    tokens, experts, width, inner = 300, 12, 200, 136
    chosen = (torch.arange(tokens, device="cuda")[:, None] * torch.tensor([1, 3, 4], device="cuda") + 1) % 11
    logits, x, weights = drawn(tokens, experts), drawn(tokens, width), drawn(tokens, 3)
    gate_up_weight, down_weight = drawn(experts, 2 * inner, width), drawn(experts, width, inner)
    order, place, ends = reference.sort_by_expert(chosen, experts)
    rows, inner_rows, gate_up = drawn(3 * tokens, width), drawn(3 * tokens, inner), drawn(3 * tokens, 2 * inner)
    total = torch.ones(experts, width, inner, device="cuda")
    return {
        "sort_by_expert": lambda by: by.sort_by_expert(chosen, experts),
        "route": lambda by: by.route(logits, 3, renormalize=True, dtype=logits.dtype),
        "route, all equal": lambda by: by.route(logits * 0, 3, renormalize=False, dtype=torch.float32),
        "expert_linear": lambda by: (by.expert_linear(inner_rows, down_weight, ends),),
        "backward": lambda by: (by.expert_linear(rows, down_weight.transpose(1, 2), ends),),
        "gated": lambda by: (by.expert_linear(x, gate_up_weight, ends, order, 3, gated=True),),
        "combine_rows": lambda by: (by.combine_rows(rows, place, weights), by.combine_rows(rows, place, None)),
        "expert_weight_gradients": lambda by: (
            by.expert_weight_gradients(rows, inner_rows, ends, None),
            by.expert_weight_gradients(rows, inner_rows, ends, total.clone()),
        ),
        "weighted_silu_and_mul_backward": lambda by: by.weighted_silu_and_mul_backward(
            inner_rows, gate_up, weights.reshape(-1)
        ),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_plain_steps(kind: torch.dtype) -> None:
    from posttrain.nn.kernels import triton

    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32).to(kind)

    rows, width, heads, kv_heads, head = 3000, 1536, 12, 2, 128
    x, gradient, carried, weight = drawn(rows, width), drawn(rows, width), drawn(rows, width), drawn(width)
    qkv, gate_up = drawn(rows, (heads + 2 * kv_heads) * head), drawn(rows, 2 * 1500)
    queries, keys, values = drawn(rows, heads, head), drawn(rows, kv_heads, head), drawn(rows, kv_heads, head)
    angles, norms = (drawn(rows, head), drawn(rows, head)), (drawn(head), drawn(head))
    logits, targets = 3 * drawn(50, 151_936), torch.arange(50, device="cuda") * 3000
    known = [stream.float() for stream in (drawn(50), drawn(50))]
    seen = attention.index_uses(torch.arange(rows, device="cuda").repeat(3)[500:], rows)
    cases = {
        "gather_backward": lambda by: (by.gather_backward(queries.repeat(3, 1, 1)[500:], *seen),),
        "add_norm": lambda by: by.add_norm(x, gradient, weight, 1e-6),
        "norm": lambda by: by.add_norm(x, None, weight, 1e-6),
        "norm_backward": lambda by: by.norm_backward(gradient, x, weight, 1e-6, carried),
        "rotate_backward": lambda by: by.rotate_backward(queries, keys, values, *angles, None, None, None, 0.0)[:1],
        "with norms": lambda by: by.rotate_backward(queries, keys, values, *angles, qkv, *norms, 1e-6),
        "silu_and_mul_backward": lambda by: by.silu_and_mul_backward(
            drawn(rows, 1500) * 0 + gate_up[:, :1500], gate_up
        ),
        "pick": lambda by: by.target_logprobs(logits, targets, 0.7),
        "pick_backward": lambda by: (
            by.target_logprobs_backward(
                logits.clone(), targets, 0.7, *by.target_logprobs(logits, targets, 0.7)[:0:-1], *known
            ),
        ),
    }
    cases |= expert_cases(drawn) | low_rank_cases(drawn)
    if kind == torch.bfloat16:
        quantized, added = reference.quantize_rows(drawn(64, width)), drawn(64)
        cases["8 bits"] = lambda by: (by.quantized_linear(x, *quantized, added),)
        cases["quantized rows"] = lambda by: by.quantize_rows(x)
    for name, run in cases.items():
        for found, expected in zip(run(triton), run(reference), strict=True):
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            assert error < (1e-5 if kind == torch.float32 else 5e-3), (name, error)
