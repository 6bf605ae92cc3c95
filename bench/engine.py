"""Generation: our engine against Hugging Face's generate on the same work, and the cache against recomputation.

BENCH_MODEL is a model's folder (otherwise random weights of a small Llama shape). Prompts are pieces of this
project's own pages, 16 to 128 tokens; every answer runs to its full length, so that both sides do equal work. Both
return the log-probability of each token.

On a GPU instead: random bf16 weights of published shapes, 128 + 256 tokens a sequence, temperature 1, every answer at
full length, log-probabilities included. `group` is how many neighbours share a prompt. BENCH_SHAPES chooses among
them, BENCH_PROFILE=1 prints the kernels of a step.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config

from posttrain.data.pack import collate
from posttrain.engines.base import Request, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.models import attention
from posttrain.models.forward import Trunk, forward
from posttrain.models.pico import build_tokenizer
from posttrain.types import Request as Wanted
from posttrain.types import Sample

REQUESTS = 64
NEW_TOKENS = 64
ROUNDS = 2
PAGES = ("README.md", "docs/architecture.md")

SHAPES = {  # hidden, layers, heads, kv heads, intermediate, vocabulary, tied, sequences
    "0.5b": (896, 24, 14, 2, 4864, 151_936, True, 512),
    "1.5b": (1536, 28, 12, 2, 8960, 151_936, True, 512),
    "7b": (3584, 28, 28, 4, 18_944, 152_064, False, 256),
}


def measure_engine() -> None:
    if torch.cuda.is_available():
        for name in os.environ.get("BENCH_SHAPES", ",".join(SHAPES)).split(","):
            on_gpu(name)
        return
    model, tokenizer = load()
    device = model.device
    prompts = pieces(tokenizer, REQUESTS)
    groups = [prompt for prompt in prompts[:8] for _ in range(8)]
    compare(f"engine {REQUESTS} prompts x {NEW_TOKENS}", model, tokenizer, prompts)
    compare(f"engine 8 prompts x 8 samples x {NEW_TOKENS}", model, tokenizer, groups)
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(Trunk.of(model), tokenizer)
    cached = min(timed(lambda: ours(engine, prompts[:8])) for _ in range(ROUNDS))
    again = timed(lambda: recomputed(engine.trunk, prompts[:8], device))
    print(f"engine 8 prompts x {NEW_TOKENS}: cache against recomputing everything: {again / cached:.2f}x")


def load():
    if folder := os.environ.get("BENCH_MODEL"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    else:
        tokenizer = build_tokenizer()
        torch.manual_seed(0)
        shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
        config = LlamaConfig(**shape, num_key_value_heads=4, vocab_size=16_384, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def pieces(tokenizer, count: int) -> list[np.ndarray]:
    root = Path(__file__).parents[1]
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in PAGES)
    tokens = np.array(tokenizer(text)["input_ids"], dtype=np.int32)
    rng = np.random.default_rng(0)
    firsts, lengths = rng.integers(0, len(tokens) - 128, count), rng.integers(16, 129, count)
    return [tokens[first : first + length] for first, length in zip(firsts, lengths, strict=True)]


def compare(name: str, model, tokenizer, prompts: list[np.ndarray]) -> None:
    model.set_attn_implementation("sdpa")
    engine = LocalEngine(Trunk.of(model), tokenizer, slots=REQUESTS)
    best = {"ours": float("inf"), "generate": float("inf")}
    for _ in range(ROUNDS):  # in turns, so that a busy machine is busy for both
        model.set_attn_implementation(attention.NAME)
        best["ours"] = min(best["ours"], timed(lambda: ours(engine, prompts)))
        model.set_attn_implementation("sdpa")
        best["generate"] = min(best["generate"], timed(lambda: theirs(model, prompts)))
    tokens = len(prompts) * NEW_TOKENS
    print(f"{name}, ours: {tokens / best['ours']:,.0f} tokens/s")
    print(f"{name}, transformers generate: {tokens / best['generate']:,.0f} tokens/s")
    print(f"{name}, ratio: {best['generate'] / best['ours']:.2f}x", flush=True)


def timed(work) -> float:
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ours(engine: LocalEngine, prompts: list[np.ndarray]) -> None:
    requests = [Request(prompt=prompt, seed=index) for index, prompt in enumerate(prompts)]
    samples = engine.generate(requests, Sampling(max_tokens=NEW_TOKENS))
    assert all(sample.mask.sum() == NEW_TOKENS for sample in samples)


@torch.inference_mode()
def theirs(model, prompts: list[np.ndarray]) -> None:
    """One batch, padded on the left; log-probabilities of the sampled tokens as its pages say to get them."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    seen = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        seen[row, width - len(prompt) :] = 1
    out = model.generate(
        ids.to(model.device),
        attention_mask=seen.to(model.device),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert out.sequences.shape[1] == width + NEW_TOKENS
    scores = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert scores.shape == (len(prompts), NEW_TOKENS)


@torch.inference_mode()
def recomputed(trunk: Trunk, prompts: list[np.ndarray], device: torch.device) -> None:
    """No cache: the whole sequence runs through the model for each new token."""
    rows = [prompt.tolist() for prompt in prompts]
    for _ in range(NEW_TOKENS):
        samples = [Sample(tokens=np.array(row, dtype=np.int32), mask=np.zeros(len(row), dtype=bool)) for row in rows]
        batch = collate(samples, device)
        logits = trunk.logits(trunk.hidden(batch).last_hidden_state[0, batch.starts[1:].long() - 1])
        for row, token in zip(rows, torch.multinomial(logits.softmax(-1), 1)[:, 0].tolist(), strict=True):
            row.append(token)


# On a GPU


def on_gpu(name: str) -> None:
    *sizes, sequences = SHAPES[name]
    model = random_weights(*sizes)
    engine = LocalEngine(Trunk.of(model), None, slots=sequences)
    rng = np.random.default_rng(0)

    def requests(group: int) -> list[Request]:
        prompts = [rng.integers(10, 100_000, 128).astype(np.int32) for _ in range(sequences // group)]
        return [Request(prompt=prompts[i // group], group=i // group, seed=i) for i in range(sequences)]

    first = requests(8)
    ready = timed(lambda: engine.generate(first, Sampling(max_tokens=4)))
    print(f"engine {name}: first 4 tokens of {sequences} sequences after {ready:.1f} s, graphs included")
    for group in (1, 8):
        work = requests(group)
        seconds = min(timed(lambda work=work: engine.generate(work, Sampling(max_tokens=256))) for _ in range(3))
        memory = torch.cuda.max_memory_allocated() / 2**30
        done = f"engine {name}, {sequences} sequences, group {group}: {sequences * 256 / seconds:,.0f} tokens/s"
        print(f"{done} ({seconds:.2f} s, {memory:.1f} GiB)", flush=True)
    samples = engine.generate(requests(1), Sampling(max_tokens=256))[:16]
    with torch.no_grad():
        again = forward(engine.trunk, collate(samples, "cuda"), Wanted()).logprobs.cpu().numpy()
    error = np.abs(again - np.concatenate([sample.logprobs for sample in samples]))
    error = error[np.concatenate([sample.mask for sample in samples])]
    print(f"engine {name}, |log-probability - the trainer's|: mean {error.mean():.4f}, largest {error.max():.3f}")
    if os.environ.get("BENCH_PROFILE"):
        profile_a_step(engine)


def random_weights(hidden, layers, heads, kv_heads, intermediate, vocabulary, tied):
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_attn_implementation(attention.NAME)
    return model.eval()


def profile_a_step(engine: LocalEngine) -> None:
    from torch.profiler import ProfilerActivity, profile

    graph = next(iter(engine.graphs.captured.values()))
    with torch.inference_mode():
        engine.slots.place.fill_(128)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            graph.replay()
            torch.cuda.synchronize()
    for kernel in sorted(seen.key_averages(), key=lambda kernel: -kernel.self_device_time_total)[:12]:
        print(f"  {kernel.self_device_time_total:8.1f} us, {kernel.count} x {kernel.key[:90]}")
