"""The plan of a pipeline: completions, tokens and examples of each stage, and the memory to generate and to train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.plan_training import Row, Target, format_size, parameter_counts, print_memory, print_rows
from posttrain.core.devices import default_device
from posttrain.core.logging import quiet_libraries
from posttrain.core.types import Ints
from posttrain.data.dataset import load_dataset
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.reading.sources import read_records
from posttrain.engines.kv_cache import bytes_per_position, keeps_latents
from posttrain.engines.local import default_slots
from posttrain.inference.generate import prompt_indices, prompts_per_batch
from posttrain.inference.model import TEMPLATE_TOKENS
from posttrain.models import memory
from posttrain.models.loading import compute_dtype, vocabulary_size
from posttrain.models.tokenizers import load_tokenizer
from posttrain.pipelines.recipes import check_pipeline, generation, training
from posttrain.pipelines.settings import RECIPES, PipelineConfig, Recipe
from posttrain.train.memory_plan import MicroBatches, frozen_model, full_micro_batch


def plan_pipeline(verb: str, config: PipelineConfig, device_gib: float = 0.0) -> int:
    """Print the plan of an iteration; the last line says whether its training fits."""
    quiet_libraries()
    check_pipeline(verb, config)
    recipe = RECIPES[verb]
    size = iteration_size(config, recipe)
    # The second iteration needs the most memory: a reference that stays the initial model is loaded beside the policy.
    trainer = training(config, recipe, min(2, config.iterations), config.model.path, "")
    trainer = replace(trainer, data=replace(trainer.data, train=(), max_length=size.longest))
    algo = ALGORITHMS[recipe.trainer](trainer.algo)
    device = torch.device("cuda") if device_gib else default_device()
    model = memory.empty_model(trainer.model, algo.head, compute_dtype(trainer.model, device))
    print(f"{verb} of {config.model.path}: {parameter_counts(memory.model_memory(model, average=False))}\n")
    print_rows(f"each of {config.iterations:,} iterations", stage_rows(config, recipe, size))
    if config.generate.samples_per_prompt:
        print_rows("memory to generate, on each device", generation_rows(config, device, size))
    print(f"training with {recipe.trainer}, in every iteration")
    step = full_micro_batch(trainer, algo)[: trainer.train.batch_size * algo.group_size]
    print_memory(trainer, algo, MicroBatches(counts=[], largest=step), Target.of("", device_gib))
    return 0


@dataclass(slots=True, frozen=True)
class IterationSize:
    """How much an iteration generates and trains on."""

    prompts: Ints  # tokens of each prompt
    held_out: Ints  # tokens of each held-out prompt
    completions: int
    longest: int  # tokens of the longest example to train on


def iteration_size(config: PipelineConfig, recipe: Recipe) -> IterationSize:
    """Count the prompts of the first iteration, or the completions that the data has."""
    held_out, data = prompt_lengths(config, config.data.eval, None), config.data
    if not config.generate.samples_per_prompt:  # the completions of the data
        (file,) = data.train
        rows = sum(1 for _ in read_records(file))
        return IterationSize(np.zeros(0, np.int32), held_out, min(rows, data.max_examples or rows), data.max_length)
    all_lengths = prompt_lengths(config, data.train, data.max_examples or None)
    settings = generation(config, 1, config.model.path, Path())
    prompts = all_lengths[list(prompt_indices(settings, len(all_lengths)))]
    longest = int(all_lengths.max()) + config.generate.max_tokens + TEMPLATE_TOKENS * recipe.conditional
    return IterationSize(prompts, held_out, len(prompts) * config.generate.samples_per_prompt, longest)


def prompt_lengths(config: PipelineConfig, files: Sequence[str], max_examples: int | None) -> Ints:
    """Return the number of tokens of each prompt."""
    if not files:
        return np.zeros(0, np.int32)
    data = replace(generation(config, 1, config.model.path, Path()).data, train=tuple(files))
    encoder = Encoder(load_tokenizer(config.model), data, "prompt", vocabulary_size(config.model))
    rows = load_dataset(data.train, encoder, max_examples).examples
    return np.array([len(rows[index][0].tokens) for index in range(len(rows))], dtype=np.int32)


def stage_rows(config: PipelineConfig, recipe: Recipe, size: IterationSize) -> Iterator[Row]:
    """Yield a line for each stage."""
    generate, prompts = config.generate, len(size.prompts)
    if generate.samples_per_prompt:
        limit, prompt_tokens = size.completions * generate.max_tokens, int(size.prompts.sum())
        tokens = f"at most {limit:,} tokens, after {prompt_tokens:,} of prompts"
        yield (
            "generate",
            f"{size.completions:,}",
            f"completions: {prompts:,} prompts x {generate.samples_per_prompt}; {tokens}",
        )
        batches = math.ceil(prompts / prompts_per_batch(generation(config, 1, config.model.path, Path())))
        yield "batches", f"{batches:,}", f"of at most {generate.batch_size:,} completions, one at a time on each device"
    yield "score", f"{size.completions:,}", f"completions, by {' '.join(config.reward.functions)}"
    rows = size.completions if recipe.conditional else prompts
    yield "select", f"{rows:,}", f"examples at most ({recipe.method}), of at most {size.longest:,} tokens each"
    train = config.train
    steps = train.max_steps or math.ceil(rows * train.epochs / train.batch_size)
    most = "" if train.max_steps else " at most"
    yield "train", f"{steps:,}", f"steps{most} of {train.batch_size:,} examples"
    if len(size.held_out):
        completions = len(size.held_out) * config.eval.samples_per_prompt
        note = f"completions, at most {completions * generate.max_tokens:,} tokens; also before the first iteration"
        yield "held-out", f"{completions:,}", note


def generation_rows(config: PipelineConfig, device: torch.device, size: IterationSize) -> Iterator[Row]:
    """Yield the memory to generate: every device has a whole model and a KV cache."""
    dtype = compute_dtype(config.model, device)
    model = frozen_model(config.model, config.model.path, dtype)
    weights = memory.model_memory(model, average=False, in_4bit=config.model.load_in_4bit).weights
    yield "weights", format_size(weights), "a whole model"
    if config.generate.engine != "local":
        yield "KV cache", "?", "vLLM uses the memory that gpu_memory_utilization allows"
        return
    at_once = min(default_slots(device), config.generate.batch_size, size.completions)
    longest = int(size.prompts.max()) + config.generate.max_tokens
    text_config = model.config.get_text_config()
    cache = at_once * longest * bytes_per_position(text_config, dtype, latents=keeps_latents(text_config, device))
    fewer = "; fewer where they do not fit" * (device.type == "cuda")
    note = f"{at_once:,} completions at a time, of at most {longest:,} tokens each with the prompt{fewer}"
    yield "KV cache", format_size(cache), note
