"""On a GPU: Triton kernels against reference kernels, captured against eager steps, bf16 against the trainer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.config.sections import ModelConfig
from posttrain.core.types import ForwardRequest as Wanted
from posttrain.core.types import SamplingDistribution
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.kernels import reference
from posttrain.engines.local import LocalEngine, RequestStream
from posttrain.models.adapters import add_adapters, inject_saved
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from tests.tiny import MIXTURES, NAMES, saved_adapter, tiny_model, tiny_tokenizer
from tests.unit.engines.test_paging import shorten_parts
from tests.unit.engines.test_scheduler import asked as mixed_requests
from tests.unit.engines.test_scheduler import run_together

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
    ("width", "kv_heads", "heads", "size"),
    [(8, 2, 4, 64), (64, 2, 14, 64), (128, 4, 28, 64), (128, 4, 28, 32), (96, 8, 8, 64), (256, 1, 4, 64)],
)
def test_rotation_and_attention(dtype, width, kv_heads, heads, size):
    from posttrain.engines.kernels import triton

    rows, capacity = 37, 1024
    blocks = rows * capacity // size + 1
    caches = [random(blocks, size, kv_heads, width, dtype=dtype) for _ in range(2)]
    copies = [stream.clone() for stream in caches]
    table = (torch.randperm(blocks - 1, device="cuda") + 1).view(rows, -1).int()
    positions = torch.randint(0, 1000, (rows,), device="cuda")
    positions[:2] = torch.tensor([0, capacity - 1])
    places = table.gather(1, positions[:, None] // size)[:, 0].long() * size + positions % size
    cos, sin = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    for norm in (None, random(width, dtype=dtype)):
        expected = reference.rotate_and_store(qkv, cos, sin, places, *caches, norm, norm, 1e-6)
        close(triton.rotate_and_store(qkv, cos, sin, places, *copies, norm, norm, 1e-6), expected, dtype, 8)
        for stream, copy in zip(caches, copies, strict=True):
            close(copy, stream, dtype, 8)
    for window in (None, 100):
        for few in (rows, 2):  # few rows: the cache is split among programs
            query = random(few, heads, width, dtype=dtype)
            arguments = (query, *caches, table[:few], positions[:few], capacity, None, window)
            close(triton.attend(*arguments), reference.attend(*arguments), dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("width", "kv_heads", "heads", "size"), [(8, 2, 4, 64), (64, 2, 14, 16), (128, 4, 28, 64)])
def test_rotation_and_attention_with_8_bit_keys_and_values(dtype, width, kv_heads, heads, size):
    from posttrain.engines.kernels import triton

    rows, columns = 37, 1024 // size
    blocks = rows * columns + 1
    caches = [reference.round_vectors(random(blocks, size, kv_heads, width, dtype=dtype)) for _ in range(2)]
    streams, exponents = zip(*caches, strict=True)
    copies, copied = ([tensor.clone() for tensor in tensors] for tensors in (streams, exponents))
    table = (torch.randperm(blocks - 1, device="cuda") + 1).view(rows, -1).int()
    positions = torch.randint(0, 1000, (rows,), device="cuda")
    positions[:2] = torch.tensor([0, size * columns - 1])
    places = table.gather(1, positions[:, None] // size)[:, 0].long() * size + positions % size
    cos, sin = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype)
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    norm = random(width, dtype=dtype)
    expected = reference.rotate_and_store(qkv, cos, sin, places, *streams, norm, norm, 1e-6, exponents)
    close(triton.rotate_and_store(qkv, cos, sin, places, *copies, norm, norm, 1e-6, copied), expected, dtype, 8)
    for found, its, stream, exponent in zip(copies, copied, streams, exponents, strict=True):
        ours, theirs = (reference.restore_vectors(*pair, torch.float32) for pair in ((found, its), (stream, exponent)))
        # A last bit before rounding may lead to the next 8-bit float, an eighth away at most.
        assert ((ours - theirs).abs() <= theirs.abs() / 7 + 8 * KINDS[dtype]).all()
        assert (ours != theirs).float().mean() < (0.001 if dtype == torch.float32 else 0.02)
    for window in (None, 100):
        for few in (rows, 2):  # few rows: the cache is split among programs
            query = random(few, heads, width, dtype=dtype)
            arguments = (query, *streams, table[:few], positions[:few], size * columns, None, window, exponents)
            close(triton.attend(*arguments), reference.attend(*arguments), dtype)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(128, 512, 64), (20, 28, 8)])
def test_attention_to_latents(heads, rank, rope, dtype):
    from posttrain.engines.kernels import triton

    rows, size, columns = 70, 64, 20
    blocks = rows * columns + 1
    latents = random(blocks, size, 1, rank + rope, dtype=dtype)
    table = (torch.randperm(blocks - 1, device="cuda") + 1).view(rows, -1).int()
    positions = torch.randint(0, 1000, (rows,), device="cuda")
    positions[:2] = torch.tensor([0, size * columns - 1])
    for few in (rows, 2):  # few rows: the cache is split among programs
        query, rotated = random(few, heads, rank, dtype=dtype), random(few, heads, rope, dtype=dtype)
        arguments = (query, rotated, latents, table[:few], positions[:few], size * columns, (rank + rope) ** -0.5)
        close(triton.attend_latents(*arguments), reference.attend_latents(*arguments), dtype)


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


def engine_for(name, dtype, slots=32, **options):
    model = tiny_model(name).to("cuda", dtype).eval()
    model.set_attn_implementation(attention.NAME)
    return LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), slots=slots, **options)


def asked(count=100):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 60, n).astype(np.int32) for n in rng.integers(1, 30, count // 4)]
    return [GenerationRequest(prompt=prompts[i // 4], group=i // 4, seed=i) for i in range(count)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", *MIXTURES])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01}], ids=str)
def test_a_captured_step_equals_an_eager_one(name, settings):
    sampling = Sampling(max_tokens=48, stop_ids=tuple(range(8, 20)), **settings)
    captured = engine_for(name, torch.float32)
    found = captured.generate(asked(), sampling)
    assert captured.can_capture()
    assert captured.executor.graphs is not None and captured.executor.graphs.captured
    plainly = engine_for(name, torch.float32)
    plainly.prepare(max(len(request.prompt) for request in asked()), len(asked()), sampling)

    class Eager:
        def run(self, key, function):
            function()

    plainly.executor.graphs = Eager()
    expected = plainly.generate(asked(), sampling)
    same = [(a, b) for a, b in zip(found, expected, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
    assert len(same) >= len(found) - 1  # a last bit may put a boundary between two tokens elsewhere
    for sample, other in same:
        assert np.abs(sample.logprobs - other.logprobs).max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gemma2"])
def test_preemption_and_parts_of_prompts_change_nothing(name, monkeypatch):
    """Captured steps over a cache that is too small, and prompts in parts, against enough memory and whole prompts."""
    sampling = Sampling(max_tokens=48, stop_ids=(8,))  # most need more blocks than admission keeps in reserve for them
    expected = engine_for(name, torch.float32).generate(asked(), sampling)
    engine = engine_for(name, torch.float32, block_size=16, cache_blocks=24)
    shortened = shorten_parts(monkeypatch, 16)
    for _ in range(2):  # the second time by graphs alone
        found = engine.generate(asked(), sampling)
        same = [(a, b) for a, b in zip(found, expected, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
        assert len(same) >= len(found) - 1  # a last bit may put a boundary between two tokens elsewhere
        assert all(np.abs(a.logprobs - b.logprobs).max() < 1e-4 for a, b in same)
    pool = engine.executor.cache.pool
    assert engine.preemptions > 0 and shortened and pool.available == pool.count


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.9, "top_k": 50}, {"repetition_penalty": 1.3}],
    ids=str,
)
def test_captured_steps_with_drafts_sample_the_same(name, settings):
    """Drafts of the sequences, then, in the second and third epoch, of the same completions; with too little memory."""
    sampling = Sampling(max_tokens=48, stop_ids=(8, 9), **settings)
    expected = engine_for(name, torch.float32).generate(asked(), sampling)
    how = {"speculative_tokens": 4, "speculative_max_sequences": 32, "block_size": 16}
    for blocks in (None, 12):  # 12: two or three completions of full length
        engine = engine_for(name, torch.float32, cache_blocks=blocks, **how)
        preempted = 0
        for _ in range(3):  # an eager step, a capture, graphs alone
            found = engine.generate(asked(), sampling)
            same = [(a, b) for a, b in zip(found, expected, strict=True) if a.tokens.tolist() == b.tokens.tolist()]
            preempted += sum(sample.preemptions for sample in found)
            assert len(same) >= len(found) - 2  # a last bit may put a boundary between two tokens elsewhere
            assert all(np.abs(a.logprobs - b.logprobs).max() < 1e-4 for a, b in same)
        drafted, accepted = (sum(getattr(s, count) for s in found) for count in ("draft_tokens", "accepted_tokens"))
        assert 0.5 * drafted < accepted and accepted > 0.3 * sum(int(sample.mask.sum()) for sample in found)
        pool, graphs = engine.executor.cache.pool, engine.executor.graphs
        assert pool.available == pool.count and engine.preemptions == preempted and (blocks is None or preempted > 0)
        assert name == "gpt2" or {key[2] for key in graphs.captured} == {0, 4}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_scheduler_with_drafts(name):
    """Captured steps that leave logits; each request has its own settings."""
    model = tiny_model(name).to("cuda").eval()
    model.set_attn_implementation(attention.NAME)
    plain = LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), slots=8)
    expected = [plain.generate([request], sampling)[0] for request, sampling in mixed_requests()]
    engine = LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), slots=8, speculative_tokens=3)
    for _ in range(3):
        ended, heard = run_together(engine, mixed_requests())
        same = [i for i, sample in enumerate(expected) if ended[i].tokens.tolist() == sample.tokens.tolist()]
        assert len(same) >= len(expected) - 1  # a last bit may put a boundary between two tokens elsewhere
        assert all(np.abs(ended[i].logprobs - expected[i].logprobs).max() < 1e-4 for i in same)
        assert all([token for token, _ in heard[i]] == ended[i].tokens[ended[i].mask].tolist() for i in ended)
    assert sum(sample.accepted_tokens for sample in ended.values()) > 20
    assert name == "gpt2" or any(key[1] is None and key[2] == 3 for key in engine.executor.graphs.captured)


def test_half_precision_with_drafts_agrees_with_the_trainer():
    """Log-probabilities of accepted tokens are the trainer's, up to what half precision rounds."""
    engine = engine_for("qwen2", torch.bfloat16, speculative_tokens=4)
    for _ in range(3):
        samples = engine.generate(asked(), Sampling(max_tokens=32, temperature=0.7))
    assert sum(sample.accepted_tokens for sample in samples) > 100
    with torch.no_grad():
        out = forward(
            engine.runner, collate(samples, "cuda"), Wanted(distribution=SamplingDistribution(temperature=0.7))
        )
    error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in samples]))
    assert error.mean() < 0.02


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("dtype", KINDS)
def test_captured_steps_record_experts(name, dtype):
    """In float32 the trainer's routers choose the same ones; with the recorded ones log-probabilities agree."""
    engine = engine_for(name, dtype, record_experts=True)
    for _ in range(2):  # the second time by graphs alone, where there are some
        samples = engine.generate(asked(), Sampling(max_tokens=24))
    assert all((sample.experts[:-1][sample.mask[1:]] >= 0).all() for sample in samples)
    batch = collate(samples, "cuda")
    with torch.no_grad():
        compared, replayed = (forward(engine.runner, batch, Wanted(experts=use)) for use in ("compare", "replay"))
    share = float(compared.rerouted.sum()) / len(batch.counted)
    assert share <= (0.002 if dtype == torch.float32 else 0.25)
    expected = torch.from_numpy(np.concatenate([sample.logprobs for sample in samples])).cuda()
    error = (replayed.logprobs - expected).abs()
    largest, mean = (1e-3, 1e-5) if dtype == torch.float32 else (0.3, 0.02)
    assert error.max() < largest and error.mean() < mean


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", KINDS)
def test_several_adapters_in_captured_steps(name, dtype, tmp_path):
    """Each sequence has its own, or none; the results are those of peft's adapter alone."""
    targets = ("c_attn", "c_fc") if name == "gpt2" else ("all-linear",)
    folders = {f"rank {rank}": saved_adapter(tiny_model(name), tmp_path / str(rank), rank, targets) for rank in (2, 17)}
    engine = engine_for(name, dtype, frozen=True)
    engine.use_adapters(folders)
    names = ["", *folders]
    mixed = [replace(request, adapter=names[i % 3]) for i, request in enumerate(asked())]
    sampling = Sampling(max_tokens=16)
    for _ in range(2):  # the second time by graphs alone, where there are some
        found = engine.generate(mixed, sampling)
    for adapter in names:
        model = tiny_model(name)
        if adapter:
            inject_saved(model, folders[adapter])
        model.to("cuda", dtype).eval().set_attn_implementation(attention.NAME)
        own = [sample for sample, request in zip(found, mixed, strict=True) if request.adapter == adapter]
        with torch.no_grad():
            out = forward(ModelRunner.from_model(model), collate(own, "cuda"), Wanted())
        error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in own]))
        assert error.mean() < (1e-5 if dtype == torch.float32 else 0.02), adapter


def test_half_precision_parts_of_prompts_agree_with_the_trainer(monkeypatch):
    """The varlen kernel, with the keys of earlier parts from the cache."""
    engine = engine_for("qwen2", torch.bfloat16)
    assert shorten_parts(monkeypatch, 16) is not None
    samples = engine.generate(asked(), Sampling(max_tokens=16))
    with torch.no_grad():
        out = forward(engine.runner, collate(samples, "cuda"), Wanted())
    error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in samples]))
    assert error.mean() < 0.01


@pytest.mark.parametrize("name", sorted({*NAMES, *MIXTURES}))
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


@pytest.mark.parametrize("dtype", KINDS)
def test_adapters_are_computed_in_captured_steps(dtype):
    pytest.importorskip("peft")
    model = tiny_model("qwen2").to("cuda", dtype).eval()
    add_adapters(model, ModelConfig(path="tiny", lora_rank=4), "token")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(ModelRunner.from_model(model), tiny_tokenizer())
    for _ in range(2):  # the second time by graphs, after the adapters have changed in place
        samples = engine.generate(asked(), Sampling(max_tokens=48))
        with torch.no_grad():
            out = forward(engine.runner, collate(samples, "cuda"), Wanted())
        error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in samples]))
        assert error.mean() < (1e-5 if dtype == torch.float32 else 0.02), (error.mean(), error.max())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.1)
    assert engine.executor.graphs is not None and engine.executor.graphs.captured
    assert all(linear.adapters for layer in engine.decoder.layers for linear in (layer.attention.qkv, layer.out))


@pytest.mark.parametrize("adapted", [False, True])
def test_quantized_weights_in_captured_steps(adapted):
    """The second time by graphs, after the weights have changed in place and were quantized again."""
    model = tiny_model("qwen2").to("cuda", torch.bfloat16).eval()
    if adapted:
        add_adapters(model, ModelConfig(path="tiny", lora_rank=4), "token")
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(ModelRunner.from_model(model), tiny_tokenizer(), quantization="fp8")
    for _ in range(2):
        samples = engine.generate(asked(), Sampling(max_tokens=48))
        with torch.no_grad():
            out = forward(engine.runner, collate(samples, "cuda"), Wanted())
        error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in samples]))
        assert 0 < error.mean() < 0.1, (error.mean(), error.max())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
    assert engine.executor.graphs is not None and engine.executor.graphs.captured and engine.decoder.quantized


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize("dtype", KINDS)
def test_a_cache_of_8_bit_floats_in_captured_steps(name, dtype):
    """Close to the trainer; with too little memory, where sequences are computed again, and with drafts too."""
    sampling = Sampling(max_tokens=48, stop_ids=(8,))
    for how in ({}, {"cache_blocks": 12, "block_size": 16}, {"speculative_tokens": 4}):
        engine = engine_for(name, dtype, kv_cache_dtype="fp8", **how)
        for _ in range(2):  # the second time by graphs alone, where there are some
            samples = engine.generate(asked(), sampling)
            with torch.no_grad():
                out = forward(engine.runner, collate(samples, "cuda"), Wanted())
            error = np.abs(out.logprobs.cpu().numpy() - np.concatenate([sample.logprobs for sample in samples]))
            assert 0 < error.mean() < 0.03, (how, error.mean(), error.max())
        assert bool(engine.preemptions) == ("cache_blocks" in how)
        assert name == "gpt2" or engine.executor.graphs.captured
        assert all(key.dtype == torch.float8_e4m3fn for key, _ in engine.executor.cache.layers.values())


def test_the_largest_logits_by_blocks():
    from posttrain.core import ops

    logits = random(64, 50_021, dtype=torch.bfloat16).float()  # rounded: many are equal
    assert torch.equal(ops.largest(logits, 20), logits.topk(20, dim=-1).values)
    for settings in ((20, 0.9, 0.01), (20, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1)):
        found, expected = ops.least_kept(logits, *settings), ops.least_kept(logits.cpu(), *settings)
        assert (found.cpu() - expected).abs().max() < 1e-5


def test_cut_off_and_added_requests_have_the_same_completions_with_captured_steps():
    engine, sampling = engine_for("llama", torch.float32, slots=8), Sampling(max_tokens=40, stop_ids=(8, 9))
    requests = asked(40)
    whole = engine.generate(requests, sampling)
    limited = [replace(request, token_limit=1 + 7 * (i % 4)) for i, request in enumerate(requests)]
    first = engine.generate(limited, sampling)
    for request, sample, expected in zip(limited, first, whole, strict=True):
        tokens = sample.tokens[sample.mask].tolist()
        assert tokens == expected.tokens[expected.mask].tolist()[: request.token_limit]
    left = [i for i, sample in enumerate(first) if sample.finish != "stop"]
    rest = []
    for i in left:
        begun = first[i].tokens[first[i].mask], first[i].logprobs[first[i].mask]
        rest.append(replace(requests[i], begun=begun))
    for i, sample in zip(left, engine.generate(rest, sampling), strict=True):
        assert sample.tokens.tolist() == whole[i].tokens.tolist()
        assert np.abs(sample.logprobs - whole[i].logprobs).max() < 1e-4
    found = {}
    with engine.generating():
        stream = RequestStream(engine, max(len(request.prompt) for request in requests), 8, sampling)
        while len(found) < len(requests):
            added = stream.scheduler.submitted
            stream.add(requests[added : added + stream.room])
            found |= stream.step()
    assert engine.executor.graphs is not None and engine.executor.graphs.captured
    assert all(found[i].tokens.tolist() == sample.tokens.tolist() for i, sample in enumerate(whole))
