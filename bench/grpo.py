"""Compare whole steps of GRPO (generation, random rewards, one update, no KL) with TRL's GRPOTrainer.

    python -m bench grpo [--shapes 0.5b,1.5b] [--micro_batch_tokens TOKENS] [--steps N] [--profile] [--out FILE]

On a GPU: 64 prompts x 8 completions, 128 + 256 tokens. On a CPU: 8 x 8, 32 + 64. Every completion has full length.
TRL generates with transformers' generate.
"""

from typing import Any

import numpy as np

from bench import common
from bench.common import GPU, SHAPES, Options, Result, Shape
from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest, Sampling

PROMPTS, SAMPLES, PROMPT, COMPLETION = (64, 8, 128, 256) if GPU else (8, 8, 32, 64)
COMPLETIONS_PER_PASS = 64 if GPU else 16  # TRL's


def measure_grpo(options: Options) -> None:
    for name in options.chosen("0.5b", "1.5b"):
        with common.saved_model(SHAPES[name]) as folder:
            compare(name, folder, options)


def compare(name: str, folder: str, options: Options) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(0)
    top = min(100_000, shape.vocabulary - 1)
    prompts = [rng.integers(10, top, (PROMPTS, PROMPT)).astype(np.int32) for _ in range(options.steps)]
    flops: list[float] = []

    def ours() -> common.Step:
        policy = common.learner(folder, options)
        algo, wanted = common.objective("grpo")
        example = [Sample(tokens=tokens, mask=np.arange(len(tokens)) >= PROMPT) for tokens in whole(prompts[0], shape)]
        flops.append(common.training_flops(policy, example, wanted, shape) + sampling_flops(shape))

        def step(number: int) -> dict[str, float]:
            began = common.clock()
            requests = [
                GenerationRequest(prompt=prompt, group=group, seed=int(rng.integers(2**62)))
                for group, prompt in enumerate(prompts[number])
                for _ in range(SAMPLES)
            ]
            samples = policy.generate(requests, Sampling(max_tokens=COMPLETION))
            generated = common.clock()
            for sample, reward in zip(samples, rng.random(len(samples)), strict=True):
                sample.reward = float(reward)
            algo.assign_credit(samples)
            loss = common.update(policy, samples, wanted)
            ended = common.clock()
            parts = {"generate": generated - began, "train": ended - generated}
            print(f"grpo {name} step {number}: " + ", ".join(f"{key} {took:.2f} s" for key, took in parts.items()))
            return {"loss": loss, **parts}

        return step

    trl = (lambda callbacks: trl_trainer(folder, prompts, options, callbacks)) if options.peer("trl") else None
    times = common.in_turns(options, ours, trl)
    seconds = times["ours"].typical
    parts = [f"{key} {common.typical([log[key] for log in times['ours'].logs]):.2f}" for key in ("generate", "train")]
    result = Result(
        what=f"GRPO {name}, {PROMPTS} x {SAMPLES}, {PROMPT} + {COMPLETION} tokens",
        ours=f"{seconds:.3g} s ({', '.join(parts)}){times['ours'].memory}",
        limits=common.share_of_limits(flops[0], 0.0, seconds),
    )
    if "TRL" in times:
        theirs = times["TRL"]
        result.peer, result.peers = f"TRL {theirs.typical:.3g} s{theirs.memory}", ("trl",)
        result.ratio = theirs.typical / seconds
    common.record(result, options)


def whole(prompts: np.ndarray, shape: Shape) -> list[np.ndarray]:
    """Return each prompt with random completions of full length, to compute the FLOPs of a step."""
    rng = np.random.default_rng(1)
    completions = rng.integers(10, shape.vocabulary - 1, (len(prompts) * SAMPLES, COMPLETION)).astype(np.int32)
    return [np.concatenate([prompts[i // SAMPLES], completion]) for i, completion in enumerate(completions)]


def sampling_flops(shape: Shape) -> float:
    """Return the FLOPs of generation; each prompt is computed once."""
    made = PROMPTS * SAMPLES * COMPLETION
    return 2.0 * (shape.layer_weights * (PROMPTS * PROMPT + made) + shape.head_weights * made)


def trl_trainer(folder: str, prompts: list[np.ndarray], options: Options, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rng = np.random.default_rng(0)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return rng.random(len(completions)).tolist()

    arguments = common.trl_options(options)
    del arguments["train_sampling_strategy"]  # it has a sampler of its own
    args = GRPOConfig(
        per_device_train_batch_size=COMPLETIONS_PER_PASS,
        gradient_accumulation_steps=PROMPTS * SAMPLES // COMPLETIONS_PER_PASS,
        num_generations=SAMPLES,
        max_completion_length=COMPLETION,
        generation_kwargs={"min_new_tokens": COMPLETION},
        shuffle_dataset=False,
        beta=0.0,
        **arguments,
    )
    rows = [{"prompt": common.text_of(prompt)} for step in prompts for prompt in step]
    return GRPOTrainer(
        model=folder,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=common.words_of(folder),
        callbacks=callbacks,
    )
