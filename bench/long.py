"""Measure long completions of different lengths, as reasoning models generate them, with log-probabilities.

    python -m bench long [--shapes 1.5b,7b] [--quantization fp8] [--rounds N] [--out FILE]

Random weights sample nearly uniformly at temperature 1. With K of V tokens as stop tokens, the length of a completion
is geometric with mean V / K: most are short, a few reach the limit. The line names the mean and the longest length, the
peak of memory, and how many sequences were preempted because the KV cache was full. The fastest round counts;
the first one captures the CUDA graphs.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bench import common
from bench.common import SHAPES, Options, Result
from posttrain.engines.base import GenerationRequest, Sampling
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


def measure_long(options: Options) -> None:
    for name in options.chosen("1.5b", "7b"):
        common.free()
        measure(name, options)


def measure(name: str, options: Options) -> None:
    work, shape = WORK[name], SHAPES[name]
    model = common.random_weights(shape, positions=2 * work.max_tokens)
    model.set_attn_implementation(attention.NAME)
    engine = LocalEngine(ModelRunner.from_model(model), None, quantization=options.quantization)
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
    name += " in fp8" if options.quantization == "fp8" else ""
    what = f"long generation {name}, {work.groups} x {work.completions} sequences, prompt {work.prompt}, at most "
    what += f"{work.max_tokens:,} (mean {lengths.mean():,.0f}, longest {lengths.max():,})"
    ours = f"{lengths.sum() / best:,.0f} tokens/s{common.peak()}, {preemptions} preemptions"
    common.record(Result(what=what, ours=ours), options)
