"""Generation with 8-bit copies of the weights: close to the model, and made again when the weights change."""

import json

import numpy as np
import pytest
import torch

from posttrain.config.sections import ModelConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import ForwardRequest
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.models import memory
from posttrain.models.adapters import add_adapters
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.kernels import reference
from tests.e2e.commands import command, rows_of
from tests.e2e.rows import write_judge
from tests.tiny import tiny_model, tiny_tokenizer

SAMPLING = Sampling(max_tokens=24)


def engine_for(model, **options):
    model.set_attn_implementation(attention.NAME)
    return LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), **options)


def requests():
    rng = np.random.default_rng(0)
    return [GenerationRequest(prompt=rng.integers(5, 60, 7 + i).astype(np.int32), seed=i) for i in range(6)]


def errors(engine, samples):
    """Differences between the sampler's log-probabilities and those of the model."""
    with torch.no_grad():
        found = forward(engine.runner, collate(samples, engine.device), ForwardRequest()).logprobs.cpu().numpy()
    mask = np.concatenate([sample.mask for sample in samples])
    return np.abs(found - np.concatenate([sample.logprobs for sample in samples]))[mask]


def test_the_product_of_quantized_rows():
    x, weight, bias = torch.randn(5, 64) * 30, torch.randn(48, 64), torch.randn(48)
    x[2] = 0
    rows, scale = reference.quantize_rows(weight)
    assert rows.dtype == torch.float8_e4m3fn and scale.shape == (48, 1)
    assert (rows.float() * scale - weight).abs().max() < 0.07 * weight.abs().max()
    found = reference.quantized_linear(x, rows, scale, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(found[2], bias)
    assert (found - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_plan_counts_the_copies_that_the_engine_makes(family):
    engine = engine_for(tiny_model(family).eval(), quantization="fp8", frozen=True)  # on a CPU others free them
    engine.generate(requests(), SAMPLING)
    made = [linear.quantized for linear in engine.decoder.linears if linear.quantized is not None]
    held = sum(tensor.nbytes for pair in made for tensor in pair)
    assert held == memory.eight_bit_bytes(tiny_model(family)) > 0


def test_completions_are_close_and_follow_the_weights():
    model = tiny_model("qwen2").eval()
    engine = engine_for(model, quantization="fp8")
    first = engine.generate(requests(), SAMPLING)
    assert 0 < errors(engine, first).mean() < 0.05, "quantized, and not far from the model"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    second = engine.generate(requests(), SAMPLING)
    assert 0 < errors(engine, second).mean() < 0.1
    fresh = engine_for(model, quantization="fp8").generate(requests(), SAMPLING)
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(second, fresh, strict=True))
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(second, fresh, strict=True))


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(UsageError, match="generates by its own code, which has no fp8"):
        engine_for(tiny_model("gpt2").eval(), quantization="fp8").generate(requests(), SAMPLING)
    adapted = tiny_model("qwen2").eval()
    add_adapters(adapted, ModelConfig(path="tiny", lora_rank=4), "token")
    with pytest.raises(UsageError, match="layers with adapters need a GPU"):
        engine_for(adapted, quantization="fp8").generate(requests(), SAMPLING)


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_a_run_with_rollouts_in_8_bits(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1)} for i in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--train.max_steps", "2", "--train.batch_size", "4", "--rollout.max_tokens", "8"]
    options += ["--rollout.samples_per_prompt", "2", "--reward", write_judge(tmp_path), f"--rollout.{option}", "fp8"]
    assert command("grpo", "--model", "pico", "--data", "prompts.jsonl", *options, "--output_dir", "run") == 0
    kl = [row["sampler_kl"] for row in rows_of(tmp_path / "run/metrics.jsonl")]
    assert len(kl) == 2 and all(0 < value < 0.05 for value in kl), kl
