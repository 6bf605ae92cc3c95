"""Whole training steps on a GPU, random bf16 weights of published shapes with float32 masters: the work of the anchors.

    python -m bench steps                  BENCH_SHAPES=0.5b,1.5b  BENCH_TASKS=grpo,sft,dpo

grpo: 64 prompts x 8 answers, 128 + 256 tokens, one update, no KL: generate, judge (random numbers), train.
sft: rows of 64..2048 tokens, 65,536 tokens a step. dpo: 64 pairs, 128 + 64..512 tokens, the reference's pass included.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from bench.engine import SHAPES, random_weights
from posttrain.algos import ALGORITHMS
from posttrain.config import ModelConfig, UpdateConfig
from posttrain.engines.base import Request, Sampling
from posttrain.learner import Learner
from posttrain.types import Objective, Sample, count

STEPS = 5
TOKENS_PER_PACK = int(os.environ.get("BENCH_PACK", "16384"))


def measure_steps() -> None:
    if not torch.cuda.is_available():
        print("steps: needs a GPU")
        return
    tasks = {"grpo": grpo, "sft": sft, "dpo": dpo}
    for shape in os.environ.get("BENCH_SHAPES", "0.5b,1.5b").split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = make_model(Path(name) / "model", shape)
            for task in os.environ.get("BENCH_TASKS", "grpo,sft,dpo").split(","):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                tasks[task](shape, str(folder))


def make_model(folder: Path, shape: str) -> Path:
    *sizes, vocabulary, tied, _ = SHAPES[shape]
    model = random_weights(*sizes, vocabulary, tied)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{vocabulary - 1}").save_pretrained(folder)
    return folder


def learner(folder: str, *, trainable: bool = True) -> Learner:
    return Learner(ModelConfig(path=folder), UpdateConfig(tokens_per_device=TOKENS_PER_PACK), trainable=trainable)


def objective(algo) -> Objective:
    return Objective(request=algo.request(lambda _: 0), loss=algo.loss, unit=algo.unit, group_size=algo.group_size)


def clock() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def peak() -> str:
    return f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"


def update(policy: Learner, samples: list[Sample], wanted: Objective) -> None:
    tokens = sum(len(sample) for sample in samples)
    policy.forward_backward(samples, wanted, count(samples, wanted.unit), tokens)
    policy.step(1e-6)


def grpo(shape: str, folder: str) -> None:
    policy = learner(folder)
    algo = ALGORITHMS["grpo"](ALGORITHMS["grpo"].Config())
    wanted = objective(algo)
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, 100_000, (64, 128)).astype(np.int32)
    for step in range(STEPS):
        began = clock()
        requests = [
            Request(prompt=prompt, group=group, seed=int(rng.integers(2**62)))
            for group, prompt in enumerate(prompts)
            for _ in range(8)
        ]
        samples = policy.generate(requests, Sampling(max_tokens=256))
        generated = clock()
        for sample, reward in zip(samples, rng.random(len(samples)), strict=True):
            sample.reward = float(reward)
        algo.score(samples)
        update(policy, samples, wanted)
        ended = clock()
        parts = f"generate {generated - began:.2f}, train {ended - generated:.2f}"
        print(f"grpo {shape} step {step}: {ended - began:.2f} s ({parts}), {peak()}", flush=True)


def ragged(rng, low: int, high: int, prompt: int = 0) -> Sample:
    size = prompt + int(rng.integers(low, high))
    tokens = rng.integers(10, 100_000, size).astype(np.int32)
    return Sample(tokens=tokens, mask=np.arange(size) >= max(1, prompt))


def sft(shape: str, folder: str) -> None:
    policy = learner(folder)
    wanted = objective(ALGORITHMS["sft"](ALGORITHMS["sft"].Config()))
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        samples: list[Sample] = []
        while sum(map(len, samples)) < 65_536:
            samples.append(ragged(rng, 64, 2048))
        began = clock()
        update(policy, samples, wanted)
        seconds, tokens = clock() - began, sum(map(len, samples))
        print(f"sft {shape} step {step}: {tokens / seconds:,.0f} tok/s, {seconds:.2f} s, {peak()}", flush=True)


def dpo(shape: str, folder: str) -> None:
    policy, reference = learner(folder), learner(folder, trainable=False)
    wanted = objective(ALGORITHMS["dpo"](ALGORITHMS["dpo"].Config()))
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        samples: list[Sample] = []
        for pair in range(64):
            prompt = rng.integers(10, 100_000, 128).astype(np.int32)
            for sample in (ragged(rng, 64, 512, 128), ragged(rng, 64, 512, 128)):
                sample.tokens[:128], sample.group = prompt, pair
                samples.append(sample)
        began = clock()
        for sample, stream in zip(samples, reference.logprobs(samples), strict=True):
            sample.ref_logprobs = stream
        update(policy, samples, wanted)
        print(f"dpo {shape} step {step}: {clock() - began:.2f} s, {peak()}", flush=True)
