"""On a GPU: Triton kernels against reference kernels, captured against eager steps, bf16 against the trainer."""

import numpy as np
import pytest
import torch

from posttrain.core.types import ForwardRequest as Wanted
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.kernels import reference
from posttrain.engines.local import LocalEngine
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from tests.tiny import NAMES, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu
KINDS = {torch.float32: 1e-5, torch.bfloat16: 2**-5}  # the largest difference: a rounding step of numbers near 4


def random(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def close(found, expected, dtype, factor=1.0):
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert (found.float() - expected.float()).abs().max() <= factor * KINDS[dtype]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("width", [48, 896, 3584])
def test_norm_and_gate(dtype, width):
    from posttrain.engines.kernels import triton

    x, residual, weight = random(33, width, dtype=dtype), random(33, width, dtype=dtype), random(width, dtype=dtype)
    found, expected = (steps.add_norm(x, residual, weight, 1e-6) for steps in (triton, reference))
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs, dtype, 2)
    both = random(33, 2 * width, dtype=dtype)
    close(triton.silu_and_mul(both), reference.silu_and_mul(both), dtype, 2)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    ("width", "kv_heads", "heads"), [(8, 2, 4), (64, 2, 14), (128, 4, 28), (96, 8, 8), (256, 1, 4)]
)
def test_rotation_and_attention(dtype, width, kv_heads, heads):
    from posttrain.engines.kernels import triton

    rows, capacity = 37, 1024
    caches = [random(40, capacity, kv_heads, width, dtype=dtype) for _ in range(2)]
    copies = [stream.clone() for stream in caches]
    positions = torch.randint(0, 1000, (rows,), device="cuda")
    positions[:2] = torch.tensor([0, 1000])
    cos, sin = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    for norm in (None, random(width, dtype=dtype)):
        expected = reference.rotate_and_store(qkv, cos, sin, positions, *caches, norm, norm, 1e-6)
        close(triton.rotate_and_store(qkv, cos, sin, positions, *copies, norm, norm, 1e-6), expected, dtype, 8)
        for stream, copy in zip(caches, copies, strict=True):
            close(copy, stream, dtype, 8)
    for window in (None, 100):
        for few in (rows, 1):  # one row: the cache is split among programs
            query = random(few, heads, width, dtype=dtype)
            arguments = (query, *caches, positions[:few], 1001, None, window)
            close(triton.attend(*arguments), reference.attend(*arguments), dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_draws(dtype):
    from posttrain.engines.kernels import triton

    rows = 512
    logits = random(rows, 50_000, dtype=dtype) * 3
    seeds, places = torch.arange(rows, device="cuda") - 5, torch.arange(rows, device="cuda") * 3
    for temperature, floor in ((1.0, None), (0.7, None), (0.7, 8.0)):
        least = None if floor is None else torch.full((rows, 1), floor, device="cuda")
        tokens, logprobs = triton.draw(logits, temperature, least, seeds, places)
        expected, expected_logprobs = reference.draw(logits, temperature, least, seeds, places)
        same = tokens == expected
        assert same.float().mean() > 0.99  # sums of another order may put a boundary elsewhere
        assert (logprobs - expected_logprobs)[same].abs().max() < 1e-5


def engine_for(name, dtype, slots=32):
    model = tiny_model(name).to("cuda", dtype).eval()
    model.set_attn_implementation(attention.NAME)
    return LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), slots=slots)


def asked(count=100):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, n).astype(np.int32) for n in rng.integers(1, 30, count // 4)]
    return [GenerationRequest(prompt=prompts[i // 4], group=i // 4, seed=i) for i in range(count)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01}], ids=str)
def test_a_captured_step_equals_an_eager_one(name, settings):
    sampling = Sampling(max_tokens=48, stop_ids=tuple(range(8, 20)), **settings)
    captured = engine_for(name, torch.float32)
    found = captured.generate(asked(), sampling)
    assert captured.executor.graphs is not None and captured.executor.graphs.captured
    plainly = engine_for(name, torch.float32)
    plainly.prepare(asked(), sampling)

    class Eager:
        def run(self, key, function):
            function()

    plainly.executor.graphs = Eager()
    expected = plainly.generate(asked(), sampling)
    same = [(a, b) for a, b in zip(found, expected, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
    assert len(same) >= len(found) - 1  # a last bit may put a boundary between two tokens elsewhere
    for sample, other in same:
        assert np.abs(sample.logprobs - other.logprobs).max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", KINDS)
def test_logprobs_equal_the_trainers(name, dtype):
    engine = engine_for(name, dtype)
    for turn in range(2):  # the second time by graphs, after the weights have changed in place
        samples = engine.generate(asked(), Sampling(max_tokens=48, stop_ids=tuple(range(8, 20))))
        with torch.no_grad():
            out = forward(engine.runner, collate(samples, "cuda"), Wanted())
        error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in samples]))
        assert error.mean() < (1e-5 if dtype == torch.float32 else 0.01), (name, turn, error.mean(), error.max())
        with torch.no_grad():
            for parameter in engine.runner.model.parameters():
                parameter.mul_(1.05)


def test_the_largest_logits_by_blocks():
    from posttrain.core import ops

    logits = random(64, 50_021, dtype=torch.bfloat16).float()  # rounded: many are equal
    assert torch.equal(ops.largest(logits, 20), logits.topk(20, dim=-1).values)
    for settings in ((20, 0.9, 0.01), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)):
        found, expected = ops.least_kept(logits, *settings), ops.least_kept(logits.cpu(), *settings)
        assert (found.cpu() - expected).abs().max() < 1e-5
