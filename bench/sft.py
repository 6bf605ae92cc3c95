"""Compare SFT on examples of different lengths with TRL's SFTTrainer.

    python -m bench sft [--shapes 0.5b,1.5b,7b,30b-a3b-4] [--row TOKENS] [--micro_batch_tokens TOKENS]
        [--steps N] [--profile]

On a GPU: examples of 64..2048 tokens, 65,536 tokens per step, every token is trained on; TRL packs them to 4,096. With
--row all examples have that length, as in the tables of other projects. On a CPU: 32 examples of 32..384 tokens, a
prompt and a completion; TRL concatenates examples without padding.
"""

from typing import Any

import numpy as np

from bench import common
from bench.common import GPU, SHAPES, Options, Result, Shape
from posttrain.core.types import Sample

TOKENS_PER_STEP = 65_536  # on a GPU
ROWS_PER_STEP = 32  # on a CPU
ROWS_PER_PASS = 2  # TRL's, on a CPU: better than 4 when tried


def measure_sft(options: Options) -> None:
    for name in options.chosen("0.5b", "1.5b"):
        with common.saved_model(SHAPES[name]) as folder:
            compare(name, folder, options)


def rows_of_steps(shape: Shape, steps: int, row: int) -> list[list[Sample]]:
    rng = np.random.default_rng(0)
    if not GPU:
        return [[question_and_answer(rng, shape) for _ in range(ROWS_PER_STEP)] for _ in range(steps)]
    found: list[list[Sample]] = [[] for _ in range(steps)]
    for rows in found:
        while sum(map(len, rows)) < TOKENS_PER_STEP:
            rows.append(common.ragged(rng, row or 64, row + 1 if row else 2048, shape))
    return found


def question_and_answer(rng: np.random.Generator, shape: Shape) -> Sample:
    sample = common.ragged(rng, 32, 385, shape)
    sample.mask[: int(len(sample) * rng.uniform(0.3, 0.7))] = False
    return sample


def compare(name: str, folder: str, options: Options) -> None:
    shape = SHAPES[name]
    rows = rows_of_steps(shape, options.steps, options.row)
    flops: list[float] = []

    def ours() -> common.Step:
        policy = common.learner(folder, options)
        _, wanted = common.objective("sft")
        flops.extend(common.training_flops(policy, step, wanted, shape) for step in rows)
        return lambda number: {"loss": common.update(policy, rows[number], wanted)}

    trl = (lambda callbacks: trl_trainer(folder, rows, options, callbacks)) if options.peer("trl") else None
    times = common.in_turns(options, ours, trl)
    size, seconds = typical_size(rows), times["ours"].typical
    kind = f"{name} in fp8" if options.fp8 else name
    result = Result(
        what=f"SFT {kind}, {size:,.0f} tokens a step in rows of {options.row or 'different lengths'}",
        ours=f"{size / seconds:,.0f} tokens/s{times['ours'].memory}",
        limits=common.share_of_limits(float(np.median(flops)), 0.0, seconds),
    )
    if "TRL" in times:
        logs = times["TRL"].logs
        if GPU:  # it packs examples itself
            size = float(np.median(np.diff([log["num_tokens"] for log in logs if "num_tokens" in log])))
        else:  # the same weights and examples give the same loss
            first = (times["ours"].logs[0]["loss"], logs[0]["loss"])
            assert abs(first[0] - first[1]) < 1e-3 * first[1], first
        rate = size / times["TRL"].typical
        result.peer, result.peers = f"TRL {rate:,.0f} tokens/s{times['TRL'].memory}", ("trl",)
        result.ratio = typical_size(rows) / seconds / rate
    common.record(result, options)


def typical_size(rows: list[list[Sample]]) -> float:
    return float(np.median([sum(map(len, step)) for step in rows]))


def trl_trainer(folder: str, rows: list[list[Sample]], options: Options, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def row(sample: Sample) -> dict[str, Any]:
        return {"input_ids": sample.tokens, "labels": np.where(sample.mask, sample.tokens, -100)}

    if GPU:
        how: dict[str, Any] = {"per_device_train_batch_size": 4, "max_length": 4096, "packing": True}
    else:
        how = {"per_device_train_batch_size": ROWS_PER_PASS, "max_length": None, "padding_free": True}
    passes = TOKENS_PER_STEP // (4 * 4096) if GPU else ROWS_PER_STEP // ROWS_PER_PASS
    return SFTTrainer(
        model=folder,
        args=SFTConfig(**how, gradient_accumulation_steps=passes, **common.trl_options(options)),
        train_dataset=Dataset.from_list([row(sample) for step in rows for sample in step]),
        processing_class=common.words_of(folder),
        callbacks=callbacks,
    )
