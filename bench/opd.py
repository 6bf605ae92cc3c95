"""Compare whole steps of on-policy distillation with TRL's DistillationTrainer: generation, reverse KL, one update.

    python -m bench opd [--shapes 0.5b] [--micro_batch_tokens TOKENS] [--steps N] [--profile] [--out FILE]

On a GPU: a student of 0.5B and a teacher of 1.5B, 512 prompts, 128 + 256 tokens. On a CPU: 32 prompts, 32 + 64, a
teacher with twice the student's layers. Every completion has full length; prompts are all different. TRL generates all
completions of a step together with transformers' generate, and trains on 128 at a time, which fit; posttrain does the
same with --micro_batch_tokens 49152.

FLOPs of a step on a GPU, in units of 1e12: layers of the student 422 (6 per weight and token), of the teacher 515 (2);
heads, over the completions' tokens, 107 and 61; generation 176.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from bench import common
from bench.common import GPU, SHAPES, Options, Result, Shape
from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest, Sampling

PROMPTS, PROMPT, COMPLETION = (512, 128, 256) if GPU else (32, 32, 64)
COMPLETIONS_PER_PASS = 128 if GPU else 16  # TRL's


def teacher_of(student: Shape) -> Shape:
    """Return the shape of the teacher: the next larger one with the same vocabulary."""
    return SHAPES["1.5b"] if GPU else replace(student, layers=2 * student.layers)


def measure_opd(options: Options) -> None:
    for name in options.chosen("0.5b"):
        with common.saved_model(SHAPES[name]) as student, common.saved_model(teacher_of(SHAPES[name])) as teacher:
            compare(name, student, teacher, options)


def compare(name: str, student: str, teacher: str, options: Options) -> None:
    shape = SHAPES[name]
    rng = np.random.default_rng(0)
    top = min(100_000, shape.vocabulary - 1)
    prompts = [rng.integers(10, top, (PROMPTS, PROMPT)).astype(np.int32) for _ in range(options.steps)]
    flops: list[float] = []

    def ours() -> common.Step:
        policy = common.learner(student, options, teacher=teacher)
        _, wanted = common.objective("opd", teacher=teacher)
        tokens = [np.concatenate([prompt, np.full(COMPLETION, 11, np.int32)]) for prompt in prompts[0]]
        example = [Sample(tokens=each, mask=np.arange(len(each)) >= PROMPT) for each in tokens]
        # The teacher has a forward pass only: 2 where training takes 6.
        taught = common.training_flops(policy, example, wanted, teacher_of(shape)) / 3
        flops.append(common.training_flops(policy, example, wanted, shape) + taught + sampling_flops(shape))

        def step(number: int) -> dict[str, float]:
            began = common.clock()
            requests = [
                GenerationRequest(prompt=prompt, group=group, seed=int(rng.integers(2**62)))
                for group, prompt in enumerate(prompts[number])
            ]
            samples = policy.generate(requests, Sampling(max_tokens=COMPLETION))
            generated = common.clock()
            loss = common.update(policy, samples, wanted)
            ended = common.clock()
            parts = {"generate": generated - began, "train": ended - generated}
            print(f"opd {name} step {number}: " + ", ".join(f"{key} {took:.2f} s" for key, took in parts.items()))
            return {"loss": loss, **parts}

        return step

    trl = (lambda calls: trl_trainer(student, teacher, prompts, options, calls)) if options.peer("trl") else None
    times = common.in_turns(options, ours, trl)
    seconds = times["ours"].typical
    parts = [f"{key} {common.typical([log[key] for log in times['ours'].logs]):.2f}" for key in ("generate", "train")]
    result = Result(
        what=f"OPD {name}, teacher {'1.5b' if GPU else 'twice as deep'}, {PROMPTS} prompts, {PROMPT} + {COMPLETION}",
        ours=f"{seconds:.3g} s ({', '.join(parts)}){times['ours'].memory}",
        limits=common.share_of_limits(flops[0], 0.0, seconds),
    )
    if "TRL" in times:
        theirs = times["TRL"]
        result.peer, result.peers = f"TRL {theirs.typical:.3g} s{theirs.memory}", ("trl",)
        result.ratio = theirs.typical / seconds
        first = (times["ours"].logs[0]["loss"], theirs.logs[0]["loss"])
        print(f"divergence of the first step: {first[0]:.4f}, TRL {first[1]:.4f} (other completions of random models)")
        assert abs(first[0] - first[1]) < 0.05 * first[1], first
    common.record(result, options)


def sampling_flops(shape: Shape) -> float:
    """Return the FLOPs of generation."""
    made = PROMPTS * COMPLETION
    return 2.0 * (shape.layer_weights * (PROMPTS * PROMPT + made) + shape.head_weights * made)


def trl_trainer(student: str, teacher: str, prompts: list[np.ndarray], options: Options, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import DistillationConfig, DistillationTrainer

    arguments = common.trl_options(options)
    args = DistillationConfig(
        per_device_train_batch_size=COMPLETIONS_PER_PASS,
        gradient_accumulation_steps=PROMPTS // COMPLETIONS_PER_PASS,
        max_completion_length=COMPLETION,
        generation_kwargs={"min_new_tokens": COMPLETION},
        shuffle_dataset=False,
        beta=1.0,  # reverse KL
        teacher_model_init_kwargs=arguments["model_init_kwargs"],
        **arguments,
    )
    rows = [{"prompt": common.text_of(prompt)} for step in prompts for prompt in step]
    return DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=common.words_of(student),
        callbacks=callbacks,
    )
