"""Compare DPO, including the reference's forward pass, with TRL's DPOTrainer.

    python -m bench dpo [--shapes 0.5b,1.5b] [--micro_batch_tokens TOKENS] [--steps N] [--profile] [--out FILE]

On a GPU: 64 pairs per step, prompts of 128 tokens and completions of 64..512. On a CPU: 16 pairs, 64 and 16..128.
TRL 1.16 pads: its DPO has no mode without padding.
"""

from typing import Any

import numpy as np

from bench import common
from bench.common import GPU, SHAPES, Options, Result, Shape
from posttrain.core.types import Sample

PAIRS, PROMPT, COMPLETION = (64, 128, (64, 512)) if GPU else (16, 64, (16, 128))
PAIRS_PER_PASS = 16 if GPU else 4  # TRL's


def measure_dpo(options: Options) -> None:
    for name in options.chosen("0.5b", "1.5b"):
        with common.saved_model(SHAPES[name]) as folder:
            compare(name, folder, options)


def pairs_of_steps(shape: Shape, steps: int) -> list[list[Sample]]:
    """Return the samples of random pairs: chosen, rejected, chosen ..."""
    rng = np.random.default_rng(0)
    found: list[list[Sample]] = [[] for _ in range(steps)]
    for samples in found:
        for pair in range(PAIRS):
            chosen, rejected = (common.ragged(rng, *COMPLETION, shape, PROMPT) for _ in range(2))
            rejected.tokens[:PROMPT] = chosen.tokens[:PROMPT]
            chosen.group = rejected.group = pair
            samples += [chosen, rejected]
    return found


def compare(name: str, folder: str, options: Options) -> None:
    shape = SHAPES[name]
    pairs = pairs_of_steps(shape, options.steps)
    flops: list[float] = []

    def ours() -> common.Step:
        policy, reference = common.learner(folder, options), common.learner(folder, options, trainable=False)
        _, wanted = common.objective("dpo")
        trained = (common.training_flops(policy, samples, wanted, shape) for samples in pairs)
        # The reference has a forward pass only: 2 where training takes 6.
        flops.extend(4 / 3 * each for each in trained)

        def step(number: int) -> dict[str, float]:
            for sample, stream in zip(pairs[number], reference.logprobs(pairs[number]), strict=True):
                sample.ref_logprobs = stream
            return {"loss": common.update(policy, pairs[number], wanted)}

        return step

    trl = (lambda callbacks: trl_trainer(folder, pairs, options, callbacks)) if options.peer("trl") else None
    times = common.in_turns(options, ours, trl)
    seconds = times["ours"].typical
    result = Result(
        what=f"DPO {name}, {PAIRS} pairs a step",
        ours=f"{seconds:.3g} s{times['ours'].memory}",
        limits=common.share_of_limits(float(np.median(flops)), 0.0, seconds),
    )
    if "TRL" in times:
        theirs = times["TRL"]
        result.peer, result.peers = f"TRL {theirs.typical:.3g} s{theirs.memory}", ("trl",)
        result.ratio = theirs.typical / seconds
        if not GPU:
            first = (times["ours"].logs[0]["loss"], theirs.logs[0]["loss"])
            assert abs(first[0] - first[1]) < 1e-3, first
    common.record(result, options)


def trl_trainer(folder: str, pairs: list[list[Sample]], options: Options, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    samples = [sample for step in pairs for sample in step]
    rows = [
        {
            "prompt": common.text_of(chosen.tokens[:PROMPT]),
            "chosen": common.text_of(chosen.tokens[PROMPT:]),
            "rejected": common.text_of(rejected.tokens[PROMPT:]),
        }
        for chosen, rejected in zip(samples[0::2], samples[1::2], strict=True)
    ]
    how = {"per_device_train_batch_size": PAIRS_PER_PASS, "gradient_accumulation_steps": PAIRS // PAIRS_PER_PASS}
    args = DPOConfig(**how, max_length=None, **common.trl_options(options))
    return DPOTrainer(
        model=folder,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=common.words_of(folder),
        callbacks=callbacks,
    )
