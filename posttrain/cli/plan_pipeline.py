"""`posttrain plan` for pipelines: answers, tokens and rows of each stage, and the memory to generate and to train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.plan import Packs, Row, amount, dtype_of, frozen, invented_pack, print_rows, show_memory, size_of
from posttrain.core.devices import default_device
from posttrain.core.logging import quiet_libraries
from posttrain.core.types import Ints
from posttrain.data.dataset import load_dataset
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.sources import read_records
from posttrain.engines.kv_cache import bytes_per_position
from posttrain.engines.local import default_slots
from posttrain.inference.generate import places_of, prompts_at_once
from posttrain.models import memory
from posttrain.models.loading import vocabulary_size
from posttrain.models.tokenizers import load_tokenizer
from posttrain.pipelines.recipes import ROOM, check, generation, training
from posttrain.pipelines.settings import RECIPES, PipelineConfig, Recipe


def plan(verb: str, config: PipelineConfig, device_gib: float = 0.0) -> int:
    """Print the plan of an iteration; whether its training fits is in the last line."""
    quiet_libraries()
    check(verb, config)
    recipe = RECIPES[verb]
    sizes = sizes_of(config, recipe)
    # The second iteration is the largest: a reference that stays the initial model lies beside the policy.
    trainer = training(config, recipe, min(2, config.iterations), config.model.path, "")
    trainer = replace(trainer, data=replace(trainer.data, train=(), max_length=sizes.longest))
    algo = ALGORITHMS[recipe.trainer](trainer.algo)
    device = torch.device("cuda") if device_gib else default_device()
    model = memory.empty_model(trainer.model, algo.head, dtype_of(trainer.model, device))
    print(f"{verb} of {config.model.path}: {size_of(memory.model_memory(model, average=False))}\n")
    print_rows(f"an iteration, of {config.iterations:,}", ledger(config, recipe, sizes))
    if config.generate.n:
        print_rows("memory to generate, on each device", generating(config, device, sizes))
    print(f"{recipe.trainer}, in every iteration")
    step = invented_pack(trainer, algo)[: trainer.train.batch_size * algo.group_size]
    show_memory(trainer, algo, Packs(counts=[], largest=step), device_gib)
    return 0


@dataclass(slots=True, frozen=True)
class Sizes:
    """What an iteration has to do."""

    prompts: Ints  # tokens of each
    held_out: Ints  # likewise
    answers: int
    longest: int  # tokens of a row to train on


def sizes_of(config: PipelineConfig, recipe: Recipe) -> Sizes:
    held_out, data = lengths(config, config.data.eval, None), config.data
    if not config.generate.n:  # the data's own answers
        (file,) = data.train
        rows = sum(1 for _ in read_records(file))
        return Sizes(np.zeros(0, np.int32), held_out, min(rows, data.max_examples or rows), data.max_length)
    every = lengths(config, data.train, data.max_examples or None)
    asked = generation(config, 1, config.model.path, Path())
    prompts = every[list(places_of(asked, len(every)))]
    longest = int(every.max()) + config.generate.max_tokens + ROOM * recipe.conditional
    return Sizes(prompts, held_out, len(prompts) * config.generate.n, longest)


def lengths(config: PipelineConfig, files: Sequence[str], max_rows: int | None) -> Ints:
    """Tokens of each prompt."""
    if not files:
        return np.zeros(0, np.int32)
    data = replace(generation(config, 1, config.model.path, Path()).data, train=tuple(files))
    encoder = Encoder(load_tokenizer(config.model), data, "prompt", vocabulary_size(config.model))
    rows = load_dataset(data.train, encoder, max_rows).rows
    return np.array([len(rows[place][0].tokens) for place in range(len(rows))], dtype=np.int32)


def ledger(config: PipelineConfig, recipe: Recipe, sizes: Sizes) -> Iterator[Row]:
    """A line a stage."""
    asked, prompts = config.generate, len(sizes.prompts)
    if asked.n:
        tokens = f"at most {sizes.answers * asked.max_tokens:,} tokens, after {int(sizes.prompts.sum()):,} of prompts"
        yield "generate", f"{sizes.answers:,}", f"answers: {prompts:,} prompts x {asked.n}; {tokens}"
        batches = math.ceil(prompts / prompts_at_once(generation(config, 1, config.model.path, Path())))
        yield "batches", f"{batches:,}", f"of at most {asked.batch:,} answers; a device has one at a time"
    yield "score", f"{sizes.answers:,}", f"answers, by {' '.join(config.reward)}"
    rows = sizes.answers if recipe.conditional else prompts
    yield "select", f"{rows:,}", f"rows at most ({recipe.method}), each of at most {sizes.longest:,} tokens"
    train = config.train
    steps = train.max_steps or math.ceil(rows * train.epochs / train.batch_size)
    most = "" if train.max_steps else " at most"
    yield "train", f"{steps:,}", f"steps{most} of {train.batch_size:,} rows"
    if len(sizes.held_out):
        answers = len(sizes.held_out) * config.eval.n
        note = f"answers, at most {answers * asked.max_tokens:,} tokens; once more before the first iteration"
        yield "held-out", f"{answers:,}", note


def generating(config: PipelineConfig, device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Every device has a whole model, and keys and values of the answers under way."""
    dtype = dtype_of(config.model, device)
    model = frozen(config.model, config.model.path, dtype)
    weights = memory.model_memory(model, average=False, in_4bit=config.model.load_in_4bit).weights
    yield "weights", amount(weights), "a whole model"
    if config.generate.engine != "local":
        yield "keys and values", "?", "vLLM takes the rest of its share, gpu_memory_utilization"
        return
    at_once = min(default_slots(device), config.generate.batch, sizes.answers)
    room = int(sizes.prompts.max()) + config.generate.max_tokens
    size = at_once * room * bytes_per_position(model.config.get_text_config(), dtype)
    fewer = "; fewer where they do not fit" * (device.type == "cuda")
    note = f"{at_once:,} answers at once, each of at most {room:,} tokens with its prompt{fewer}"
    yield "keys and values", amount(size), note
