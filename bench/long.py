"""Measure long completions of different lengths, as reasoning models generate them, with log-probabilities.

    python -m bench long [--shapes 1.5b,7b] [--quantization fp8] [--kv_cache_dtype fp8] [--rounds N] [--out FILE]

Random weights sample nearly uniformly at temperature 1. With K of V tokens as stop tokens, the length of a completion
is geometric with mean V / K: most are short, a few reach the limit. The line names the mean and the longest length, the
peak of memory, and how many sequences were preempted because the KV cache was full. The fastest round counts;
the first one captures the CUDA graphs.

Then the tail alone: few sequences, with and without speculative decoding. Greedy completions of random weights repeat
themselves, so nearly all drafts would be right; a share of the drafted tokens is made wrong. Each line names how many
were accepted. Where the ratio falls to 1 is the largest rollout.speculative_max_sequences that is worth setting. With
`--model FOLDER` (on a CPU) these are completions of a real model instead, with drafts as they are.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import common
from bench.common import SHAPES, Options, Result
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.drafts import Drafter, SequenceDrafts
from posttrain.engines.local import LocalEngine
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner

ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Groups of completions, their prompts' length, the longest completion, and the number of stop tokens."""

    groups: int
    completions: int
    prompt: int
    max_tokens: int
    stops: int


WORK = {
    "small": Work(4, 4, 64, 512, 200),  # for a CPU
    "0.5b": Work(64, 8, 256, 8192, 100),
    "1.5b": Work(64, 8, 256, 8192, 100),
    "7b": Work(32, 8, 512, 16384, 75),
}


DRAFTS = 4  # tokens
TAIL_COUNTS = (1, 8, 32, 64) if common.GPU else (1, 4)  # sequences
TAIL_TOKENS = 512 if common.GPU else 96
WRONG = (0.0, 0.3, 0.6, 1.0)  # share of the drafted tokens


def measure_long(options: Options) -> None:
    if options.model:
        measure_real_tail(options)
        return
    for name in options.chosen("1.5b", "7b"):
        common.free()
        measure(name, options)
        common.free()
        measure_tail(name, options)


def measure(name: str, options: Options) -> None:
    work, shape = WORK[name], SHAPES[name]
    model = common.random_weights(shape, positions=2 * work.max_tokens)
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(ModelRunner.from_model(model), None, **options.engine_formats)
    rng = np.random.default_rng(0)
    top = min(100_000, shape.vocabulary - 1)
    prompts = [rng.integers(work.stops, top, work.prompt).astype(np.int32) for _ in range(work.groups)]
    requests = [
        GenerationRequest(prompt=prompt, group=group, seed=group * work.completions + i)
        for group, prompt in enumerate(prompts)
        for i in range(work.completions)
    ]
    sampling = Sampling(max_tokens=work.max_tokens, stop_ids=tuple(range(work.stops)))
    best, lengths, preemptions = float("inf"), np.zeros(0), 0
    for _ in range(options.rounds or ROUNDS):
        before = engine.preemptions
        samples = []
        seconds = common.timed(lambda: samples.extend(engine.generate(requests, sampling)))  # noqa: B023
        print(f"  {sum(int(sample.mask.sum()) for sample in samples):,} tokens in {seconds:.1f} s", flush=True)
        if seconds < best:
            best, preemptions = seconds, engine.preemptions - before
            lengths = np.array([int(sample.mask.sum()) for sample in samples])
        assert torch.isfinite(torch.tensor(np.concatenate([sample.logprobs for sample in samples]))).all()
    name += options.described_formats
    what = f"long generation {name}, {work.groups} x {work.completions} sequences, prompt {work.prompt}, at most "
    what += f"{work.max_tokens:,} (mean {lengths.mean():,.0f}, longest {lengths.max():,})"
    ours = f"{lengths.sum() / best:,.0f} tokens/s{common.peak()}, {preemptions} preemptions"
    common.record(Result(what=what, ours=ours), options)


# The tail


class WrongDrafts(Drafter):
    """Makes a share of the drafted tokens wrong."""

    def __init__(self, share: float) -> None:
        super().__init__(DRAFTS, max(TAIL_COUNTS))
        self.share, self.rng = share, np.random.default_rng(0)

    def open(self, *arguments: Any) -> SequenceDrafts:
        opened, drafter = super().open(*arguments), self

        class Corrupted(SequenceDrafts):
            def propose(self, count: int) -> list[int]:
                draft = super().propose(count)
                wrong = drafter.rng.random(len(draft)) < drafter.share
                return [token ^ 1 if bad else token for token, bad in zip(draft, wrong, strict=True)]

        return Corrupted(opened.ngrams, opened.number)


def measure_tail(name: str, options: Options) -> None:
    """Measure few greedy sequences of random weights, without drafts and with drafts of which a share is wrong."""
    work, shape = WORK[name], SHAPES[name]
    model = common.random_weights(shape, positions=2 * work.max_tokens)
    model.set_attn_implementation(attention.NAME)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, min(100_000, shape.vocabulary - 1), (max(TAIL_COUNTS), work.prompt)).astype(np.int32)
    sampling = Sampling(max_tokens=TAIL_TOKENS, temperature=0.0)
    engines = {None: LocalEngine(ModelRunner.from_model(model), None, slots=max(TAIL_COUNTS))}
    for share in WRONG:
        engines[share] = LocalEngine(engines[None].runner, None, slots=max(TAIL_COUNTS), speculative_tokens=DRAFTS)
        engines[share].drafter, engines[share].keeps_completions = WrongDrafts(share), False
    for count in TAIL_COUNTS:
        requests = [GenerationRequest(prompt=prompt, group=i, seed=i) for i, prompt in enumerate(prompts[:count])]
        record_tail(f"random weights {name}, greedy", requests, sampling, engines, options)


def measure_real_tail(options: Options) -> None:
    """Measure completions that repeat a part of their prompts, and some that do not, by a real model."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32, local_files_only=True).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    model.set_attn_implementation(attention.NAME)
    plain = LocalEngine(ModelRunner.from_model(model), tokenizer)
    engines = {None: plain, 0.0: LocalEngine(plain.runner, tokenizer, speculative_tokens=DRAFTS)}
    sampling = Sampling(max_tokens=TAIL_TOKENS, temperature=0.0, stop_ids=(tokenizer.eos_token_id,))
    tasks = {
        "repeating a text": f"Repeat this text word by word:\n{TEXT}",
        "a question": "What are three good habits of programmers, and why?",
    }
    for what, task in tasks.items():
        chat = [{"role": "user", "content": task}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        requests = [GenerationRequest(prompt=np.array(prompt, dtype=np.int32), seed=i) for i in range(4)]
        for temperature in (0.0, 1.0):
            how = replace(sampling, temperature=temperature)
            few = requests if temperature else requests[:1]
            name = f"{Path(options.model).name}, {what}, temperature {temperature:g}"
            record_tail(name, few, how, engines, options)


TEXT = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").partition("\n\n")[2][:600]


def record_tail(
    name: str,
    requests: list[GenerationRequest],
    sampling: Sampling,
    engines: dict[float | None, LocalEngine],
    options: Options,
) -> None:
    """Compare engines with drafts with the one without, which has the key None; rounds alternate."""
    best = dict.fromkeys(engines, 0.0)
    accepted: dict[float | None, float] = {}
    for _ in range(1 + (options.rounds or ROUNDS)):  # the first captures graphs
        for share, engine in engines.items():
            samples = []
            seconds = common.timed(lambda: samples.extend(engine.generate(requests, sampling)))  # noqa: B023
            best[share] = max(best[share], sum(int(sample.mask.sum()) for sample in samples) / seconds)
            drafted = sum(sample.draft_tokens for sample in samples)
            accepted[share] = sum(sample.accepted_tokens for sample in samples) / max(1, drafted)
    for share in [share for share in engines if share is not None]:
        what = f"tail of {len(requests)} sequences, {name}, drafts of {DRAFTS} tokens, {accepted[share]:.0%} accepted"
        result = Result(what=what, ours=f"{best[share]:,.0f} tokens/s", ratio=best[share] / best[None])
        result.peer = f"without drafts {best[None]:,.0f} tokens/s"
        common.record(result, options)
