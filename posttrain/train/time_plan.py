"""Estimates the time of a step of a configuration: its phases, and what bounds each (train/step_time.py)."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from posttrain.algorithms import Algorithm, OnlineAlgorithm
from posttrain.algorithms.opd import SELF, is_address
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.types import Head
from posttrain.engines.kv_cache import bytes_per_position, keeps_latents
from posttrain.engines.local import MORE_SLOTS_SHARE, SLOT_LIMIT, default_slots
from posttrain.engines.vllm.options import VLLM_SHARE, VLLM_SHARE_BESIDE
from posttrain.models import memory
from posttrain.models.freezing import without_freezing
from posttrain.models.loading import compute_dtype
from posttrain.models.memory import Sharding
from posttrain.models.work import ModelWork, work_of
from posttrain.nn.layers import supports_fused_layers
from posttrain.train import step_time
from posttrain.train.layout_check import vllm_engine_size
from posttrain.train.memory_plan import generates_in_8_bits, sharding_of, shares_learners
from posttrain.train.run_data import RunData
from posttrain.train.step_time import GenerationWork, Machines, StepTime, StepWork

VLLM_SEQUENCES = 256  # that vLLM generates at a time, unless max_num_seqs is set
TRAINED_BYTES = 16  # per trained parameter: master weight, gradient, two moments


@dataclass(slots=True, frozen=True, kw_only=True)
class Lengths:
    """Lengths of a step's samples, in tokens."""

    samples: int  # completions of an online trainer
    prompts: int = 0  # different ones; 0: offline
    mean: float = 0.0  # of a sample, offline
    mean_square: float = 0.0
    counted_share: float = 1.0  # of the tokens
    prompt: float = 0.0
    completion: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of all samples, as the metric `tokens` counts them."""
        return self.samples * (self.prompt + self.completion if self.prompts else self.mean)


@dataclass(slots=True, frozen=True)
class PhaseTimes:
    """Seconds of a step by phase, each divided by what they are spent on."""

    phases: dict[str, StepTime] = field(default_factory=dict)
    overlapped: bool = False  # completions are generated on other devices while the policy is trained

    @property
    def seconds(self) -> float:
        if not self.overlapped:
            return sum(phase.seconds for phase in self.phases.values())
        rest = sum(phase.seconds for name, phase in self.phases.items() if name != "generate")
        return max(self.phases["generate"].seconds, rest)

    def bound(self) -> str:
        """Return what bounds the step: its longest phase, and what that spends most time on."""
        name = max(self.phases, key=lambda phase: self.phases[phase].seconds)
        part = self.phases[name].largest()
        share = self.phases[name].parts[part] / self.phases[name].seconds
        return f"{name}: {part.removeprefix('decoding: ')} ({share:.0%} of it)"


def step_lengths(config: Config, algo: Algorithm, data: RunData | None, completion_tokens: int = 0) -> Lengths:
    """Return the lengths of an average step; without data those of the longest samples.

    `completion_tokens`: the mean length of completions; 0: all have rollout.max_tokens.
    """
    batch, longest = config.train.batch_size, config.data.max_length
    found = None if data is None else data.train.examples.lengths().astype(float)
    if isinstance(config, OnlineConfig):
        prompt = max(1, longest - config.rollout.max_tokens) if found is None else float(found.mean())
        completion = completion_tokens or config.rollout.max_tokens
        n = config.rollout.samples_per_prompt
        return Lengths(samples=batch * n, prompts=batch, prompt=prompt, completion=completion)
    samples = batch * algo.group_size
    if found is None or data is None:
        return Lengths(samples=samples, mean=longest, mean_square=longest**2)
    share = data.train.examples.counted() / float(found.sum())
    square = float((found**2).mean())
    return Lengths(samples=samples, mean=float(found.mean()), mean_square=square, counted_share=share)


def step_work(config: Config, algo: Algorithm, lengths: Lengths, *, shared_prompts: bool) -> StepWork:
    """Return what a step of training processes."""
    how: dict[str, Any] = {
        "micro_batch_tokens": config.train.micro_batch_tokens,
        "checkpointing": config.model.gradient_checkpointing,
        "separable": algo.is_separable(),
    }
    if not lengths.prompts:
        tokens, squares = lengths.tokens, lengths.samples * lengths.mean_square
        return StepWork(tokens=tokens, counted=tokens * lengths.counted_share, squares=squares, **how)
    whole, counted = lengths.prompt + lengths.completion, lengths.samples * lengths.completion
    prompts = lengths.prompts if shared_prompts else lengths.samples
    tokens = prompts * lengths.prompt + counted
    squares = prompts * lengths.prompt**2 + lengths.samples * (whole**2 - lengths.prompt**2)
    if isinstance(algo, OnlineAlgorithm):
        size = algo.config.mini_batch_size or lengths.samples
        how |= {"updates": max(1, math.ceil(lengths.samples / size)), "epochs": algo.config.epochs_per_batch}
    return StepWork(tokens=tokens, counted=counted, squares=squares, **how)


def model_work(config: Config, path: str, head: Head, device: torch.device, *, adapters: bool = True) -> ModelWork:
    """Return the work of a model of the run."""
    own = replace(config.model if adapters else replace(without_freezing(config.model), lora_rank=0), path=path)
    dtype = compute_dtype(config.model, device)
    key = ("work", astuple(own), head, dtype)
    return memory.kept(key, lambda: work_of(memory.counted_model(own, head, dtype)))


def estimate_time(
    config: Config, algo: Algorithm, device: torch.device, machines: Machines, lengths: Lengths, available: int
) -> PhaseTimes:
    """Estimate the seconds of a step; reward functions and environments are not counted."""
    work = model_work(config, config.model.path, algo.head, device)
    model = memory.counted_model(config.model, algo.head, compute_dtype(config.model, device))
    shared = memory.kept(("fused", config.model.path), lambda: supports_fused_layers(model))
    step, sharding = step_work(config, algo, lengths, shared_prompts=shared), sharding_of(config)
    phases: dict[str, StepTime] = {}
    online = config if isinstance(config, OnlineConfig) and not config.rollout.replay else None
    if online is not None:
        phases["generate"] = memory.kept(
            generation_key(online, lengths), lambda: generate_time(online, work, device, machines, lengths, available)
        )
    helpers = helper_time(config, algo, device, machines, step)
    if helpers.parts:
        phases["helpers"] = helpers
    phases["train"] = step_time.train_seconds(work, machines, sharding, step, config.cluster.offload)
    if online is None:
        return PhaseTimes(phases)
    apart = 0 if shares_learners(online, "rollout") else online.cluster.of("rollout").devices
    transfer = step_time.transfer_seconds(work, machines, sharding, receivers=apart, engine=vllm_engine_size(config))
    if transfer.parts:
        phases["weights"] = transfer
    return PhaseTimes(phases, overlapped=bool(apart and online.rollout.ahead))


def generation_key(config: OnlineConfig, lengths: Lengths) -> tuple[Any, ...]:
    placed, size = config.cluster.of("rollout"), vllm_engine_size(config)
    formats = (config.rollout.quantization, config.rollout.kv_cache_dtype)
    return ("generate", config.model.path, placed.place, placed.devices, size, formats, lengths)


def generate_time(
    config: OnlineConfig, work: ModelWork, device: torch.device, machines: Machines, lengths: Lengths, available: int
) -> StepTime:
    """Estimate the time in which the completions of a step are generated."""
    placed, size = config.cluster.of("rollout"), vllm_engine_size(config)
    dtype = compute_dtype(config.model, device)
    hf_config = memory.counted_model(config.model, "token", dtype).config.get_text_config()
    latents, rounded = keeps_latents(hf_config, device), config.rollout.kv_cache_dtype == "fp8"
    cache = bytes_per_position(hf_config, dtype, latents=latents, rounded=rounded)
    options, shares = config.rollout.vllm_options, shares_learners(config, "rollout")
    weights = work.element_size * work.parameters / size
    per_slot = cache * (lengths.prompt + config.rollout.max_tokens)
    slots = max(default_slots(torch.device("cuda")), min(SLOT_LIMIT, int(MORE_SLOTS_SHARE * available / per_slot)))
    room = (1 - memory.MARGIN) * available - weights
    if config.rollout.engine == "vllm":
        slots = int(options.get("max_num_seqs", VLLM_SEQUENCES))
        share = float(options.get("gpu_memory_utilization", VLLM_SHARE_BESIDE if shares else VLLM_SHARE))
        room = share * available - weights
    elif shares:
        room -= TRAINED_BYTES * work.trained / sharding_of(config).devices
    held = cache / size * (lengths.prompt + lengths.completion)  # by one sequence at its end
    job = GenerationWork(
        prompts=lengths.prompts,
        completions=lengths.samples,
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        max_tokens=config.rollout.max_tokens,
        cache_bytes=cache,
        engines=max(1, placed.devices // size),
        devices_per_engine=size,
        slots=max(1, min(slots, int(room / held))),
        in_8_bits=generates_in_8_bits(config, placed.place),
    )
    return step_time.generation_seconds(work, machines, job)


def helper_time(config: Config, algo: Algorithm, device: torch.device, machines: Machines, step: StepWork) -> StepTime:
    """Estimate the passes of other models: reference, teacher, critic, reward models, old log-probabilities."""
    total, path = StepTime(), config.model.path
    passes: list[tuple[str, Head, Sharding]] = []
    needs = algo.needs()
    if "ref_logprobs" in needs and not algo.precompute_reference():
        passes.append((algo.reference_path() or path, "token", sharding_of(config, "reference")))
    if needs & {"old_logprobs", "logprobs"}:
        passes.append((path, "token", sharding_of(config)))
    if isinstance(config, OnlineConfig) and config.rollout.record_entropy:
        passes.append((path, "token", sharding_of(config)))
    if algo.teacher_path():
        passes.append((algo.teacher_path(), "token", sharding_of(config)))
    asked = algo.teachers() if isinstance(algo, OnlineAlgorithm) else None
    for teacher in [] if asked is None else asked.teachers:
        if not is_address(teacher):
            passes.append((path if teacher == SELF else teacher, "token", sharding_of(config, "reference")))
    if isinstance(config, OnlineConfig):
        for index, text in enumerate(config.reward.functions):
            if text.startswith("model:"):
                passes.append((text.removeprefix("model:"), "score", sharding_of(config, f"reward-{index}")))
    for where, head, sharding in passes:
        work = model_work(config, where, head, device, adapters=False)
        total.add(step_time.pass_seconds(work, machines, sharding, step, backward=False))
    settings = algo.critic() if isinstance(algo, OnlineAlgorithm) else None
    if settings is not None:
        own = replace(config, model=without_freezing(config.model))
        work, sharding = model_work(own, settings.path or path, "score", device), sharding_of(config, "critic")
        total.add(step_time.pass_seconds(work, machines, sharding, step, backward=False))
        total.add(step_time.train_seconds(work, machines, sharding, step))
    return total
