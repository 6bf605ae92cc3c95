"""The fat steps of decoder layers give what the models' own code gives, forward and backward."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from posttrain.config.sections import ModelConfig
from posttrain.core.types import ForwardRequest, MicroBatch, Sample, SamplingDistribution
from posttrain.data.packing import collate
from posttrain.models import adapters
from posttrain.nn import attention, layers, lm_head
from posttrain.nn.forward import ModelRunner, forward, verify_against_stock
from posttrain.nn.kernels import reference
from posttrain.nn.optimizer import accumulate_into

FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama with biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
}
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


def gradients(model, device: str = "cpu", *, by: object = None, shared: int = 0) -> dict[str, torch.Tensor]:
    """Of a loss that uses log-probabilities and entropies; `by` the steps of a module, or the model's own code."""
    model = copy.deepcopy(model).to(device)
    runner = ModelRunner(model, attention.supports_varlen_kernel(model))  # without a plain head
    if by is not None:
        assert layers.use_fused_layers(model, by)
        runner.fused_head = lm_head.FusedHead.from_model(model, by)
        assert runner.fused_head is not None
    verify_against_stock(runner)
    loss = loss_of(runner, collate(some_samples(), torch.device(device), shared))
    loss.backward()
    found = {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach().float().cpu()}


def loss_of(runner: ModelRunner, batch: MicroBatch) -> torch.Tensor:
    names = frozenset({"logprobs", "entropy"})
    out = forward(
        runner,
        batch,
        ForwardRequest(names=names, distribution=SamplingDistribution(temperature=0.7), entropy_gradient=True),
    )
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


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_adapters_keep_their_own_code(family: str) -> None:
    model = model_of(family)
    adapters.add_adapters(model, ModelConfig(lora_rank=4), "token")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    found = gradients(model, by=reference)
    assert any("lora_A" in name for name in found)
    assert not any(name.endswith("base_layer.weight") for name in found)
    assert largest_error(found, gradients(model)) < 3e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_go_to_the_masters_where_there_are_some(family: str) -> None:
    """Twice, as for two micro-batches: gradients accumulate there, also those that autograd computes."""
    model = model_of(family)
    expected = gradients(model)
    layers.use_fused_layers(model, reference)
    runner = ModelRunner(model, varlen_kernel=False, fused_head=lm_head.FusedHead.from_model(model, reference))
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        setattr(parameter, layers.MASTER, masters[name])
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
    joined = layers.joined_view([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])
    assert joined is not None
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        own.k_proj.weight.fill_(7.0)
    assert (joined[len(own.q_proj.weight) :][: len(own.k_proj.weight)] == 7.0).all()
    assert layers.joined_view([own.k_proj.weight, own.q_proj.weight]) is None


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
    """Both in half precision on the device, against float32."""
    from posttrain.nn.kernels import triton

    model = model_of(family)
    exact = gradients(model)
    half = model.to(torch.bfloat16)
    stock, fast = gradients(half, "cuda"), gradients(half, "cuda", by=triton, shared=shared)
    assert largest_error(fast, exact) < 1.5 * largest_error(stock, exact)


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
    for name, run in cases.items():
        for found, expected in zip(run(triton), run(reference), strict=True):
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            assert error < (1e-5 if kind == torch.float32 else 5e-3), (name, error)
