"""The plan of a training run: batches, steps and memory, from the data and the model's config, without weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from posttrain.algorithms import ALGORITHMS, Algorithm
from posttrain.cli.plan_layouts import fitting_options, other_roles
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.device_rates import DEVICES, DeviceRates, rates_of
from posttrain.core.devices import default_device, device_memory
from posttrain.core.logging import quiet_libraries
from posttrain.core.types import Sample
from posttrain.models import memory
from posttrain.models.loading import compute_dtype
from posttrain.models.memory import MemoryEstimate, ModelMemory
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train.layout_check import check_layouts
from posttrain.train.memory_plan import (
    MicroBatches,
    estimate_memory,
    full_micro_batch,
    pack_first_steps,
    sharding_of,
    vocabulary_of,
    with_model,
    without_cache,
)
from posttrain.train.run_data import RunData, load_data
from posttrain.train.step_time import Machines
from posttrain.train.time_plan import Lengths, estimate_time, model_work, step_lengths, step_work

GIB = 2**30

Row = tuple[str, str, str]
"""A line of the plan: name, value, note."""
OPTIMIZERS = {
    "adamw": ("AdamW", "two float32 moments"),
    "adamw_8bit": ("8-bit AdamW", "two moments of 8 bits; float32 for embeddings and small tensors"),
    "muon": ("Muon", "a float32 momentum; two moments outside the layers' matrices"),
    "adafactor": ("Adafactor", "float32, one number per row and per column"),
    "schedule_free": ("schedule-free AdamW", "a float32 moment and a second point"),
}
"""Name and states of an optimizer."""


@dataclass(slots=True, frozen=True)
class Target:
    """The devices to plan for."""

    device: torch.device
    name: str
    available: int  # bytes of one device
    rates: DeviceRates | None = None  # None: unknown, so that no time is estimated
    devices_per_machine: int = 8
    completion_tokens: int = 0  # mean length; 0: rollout.max_tokens

    @classmethod
    def of(cls, name: str, gib: float, devices_per_machine: int = 8, completion_tokens: int = 0) -> Target:
        """Return the devices named, or with this much memory, or those of this machine."""
        more = devices_per_machine, completion_tokens
        if name or gib:
            rates = DEVICES[name] if name else None
            size = gib or (rates.memory_gib if rates else 0.0)
            return cls(torch.device("cuda"), "one device", round(size * GIB), rates, *more)
        device = default_device()
        found, available = device_memory(device)
        return cls(device, found, available, rates_of(found), *more)


def plan_training(verb: str, config: Config, device_gib: float = 0.0, target: Target | None = None) -> int:
    """Print the plan; the last line says whether it fits. `device_gib`: memory of accelerators that are not here."""
    with memory.keep_estimates():
        return print_plan(verb, config, target or Target.of("", device_gib))


def print_plan(verb: str, config: Config, target: Target) -> int:
    quiet_libraries()
    algo, device = ALGORITHMS[verb](config.algo), target.device
    check_layouts(config, algo)
    model = memory.counted_model(config.model, algo.head, compute_dtype(config.model, device))
    data, batches = None, MicroBatches(counts=[], largest=full_micro_batch(config, algo))
    if config.data.train:
        data = load_data(config, algo, load_tokenizer(config.model), vocabulary_of(model))
        print(*data.train.descriptions, sep="\n")
        batches = pack_first_steps(config, algo, data)
    print(f"{verb} of {config.model.path}: {parameter_counts(memory.model_memory(model, average=False))}\n")
    print_rows("batches", batch_rows(config, algo, data, batches))
    lengths = step_lengths(config, algo, data, target.completion_tokens)
    print_memory(config, algo, batches, target, lengths)
    return 0


def print_memory(
    config: Config, algo: Algorithm, batches: MicroBatches, target: Target, lengths: Lengths | None = None
) -> None:
    """Print the memory that training needs and the time of a step, and in the last line whether it fits."""
    device, name, available = target.device, target.name, target.available
    needs = estimate_memory(config, algo, device, batches.largest, available)
    where = f"{'each device' if sharding_of(config).devices > 1 else name} with {format_size(available)}"
    print_rows(f"memory on {where}", memory_rows(config, algo, device, needs, batches.largest))
    print_rows("peak memory in", [(phase, format_size(size), "") for phase, size in needs.phases.items()])
    others = list(other_roles(config, algo, device, available))
    if others:
        rows = [(role.role, format_size(role.needed) if role.needed else "?", role.note) for role in others]
        print_rows("memory on each device of other roles", rows)
    if target.rates is not None and lengths is not None:
        print_rows("time of a step", time_rows(config, algo, target, lengths))
    print(verdict(config, algo, device, batches.largest, needs, available))


def time_rows(config: Config, algo: Algorithm, target: Target, lengths: Lengths) -> Iterator[Row]:
    """Yield the phases of a step with what takes their time, then the whole."""
    assert target.rates is not None
    machines = Machines(target.rates, target.devices_per_machine)
    times = estimate_time(config, algo, target.device, machines, lengths, target.available)
    for name, phase in times.phases.items():
        parts = sorted(phase.parts.items(), key=lambda part: -part[1])
        shown = [f"{part} {seconds / phase.seconds:.0%}" for part, seconds in parts if seconds > 0.05 * phase.seconds]
        yield name, format_seconds(phase.seconds), ", ".join(shown)
    yield "all", format_seconds(times.seconds), "the longer of generation and the rest" if times.overlapped else ""
    devices, rate = config.cluster.devices, lengths.tokens / times.seconds
    yield "tokens per second", f"{rate:,.0f}", f"{rate / devices:,.0f} per device"
    train = times.phases["train"]
    work = model_work(config, config.model.path, algo.head, target.device)
    step = step_work(config, algo, lengths, shared_prompts=False)
    flops = step.epochs * work.model_flops(step.tokens, step.counted, step.squares)
    learners = sharding_of(config).devices
    used = flops / train.seconds / learners / target.rates.flops
    yield (
        "model FLOP utilisation",
        f"{used:.0%}",
        f"of {target.rates.flops / 1e12:,.0f} TFLOP/s, while the policy trains",
    )


def batch_rows(config: Config, algo: Algorithm, data: RunData | None, batches: MicroBatches) -> Iterator[Row]:
    """Yield the number of devices, examples, tokens, steps and micro-batches."""
    train, sharding = config.train, sharding_of(config)
    if sharding.devices > 1:
        note = f"data parallel {sharding.data_parallel_size}"
        note += f", pipeline parallel {sharding.pipeline}" if sharding.pipeline > 1 else ""
        note += f", context parallel {sharding.context}" if sharding.context > 1 else ""
        note += f" ({sharding.ulysses} exchange heads)" if sharding.ulysses else ""
        note += f", tensor parallel {sharding.tensor}" if sharding.tensor > 1 else ""
        note += " with sequence parallelism" if sharding.sequence else ""
        note += f", expert parallel {sharding.experts}" if sharding.experts > 1 else ""
        note += f", {sharding.replicate} copies" if sharding.replicate > 1 else ""
        yield "devices", f"{sharding.devices:,}", f"{note}; ZeRO stage {sharding.zero}"
    if data is None:
        yield "examples", "?", "data.train is not set"
        yield "steps", f"{train.max_steps:,}" if train.max_steps else "?", f"of {train.batch_size} examples"
        if isinstance(config, OnlineConfig):
            yield completions_row(config)
        yield "micro-batch tokens", f"{sum(map(len, batches.largest)):,}", "at most"
        return
    yield from data_rows(config, algo, data)
    yield from micro_batch_rows(config, data, batches)
    if data.eval is not None:
        yield "evaluation examples", f"{len(data.eval.examples):,}", ""


def completions_row(config: OnlineConfig) -> Row:
    n = config.rollout.samples_per_prompt
    return "completions per step", f"{config.train.batch_size * n:,}", f"{n} per prompt"


def data_rows(config: Config, algo: Algorithm, data: RunData) -> Iterator[Row]:
    """Yield the number of examples, samples, tokens and steps."""
    examples, counts = len(data.train.examples), data.train.counts
    lengths, counted = data.train.examples.lengths(), data.train.examples.counted()
    tokens = int(lengths.sum())
    changed = ", ".join(f"{counts[key]:,} {key}" for key in ("truncated", "dropped", "quarantined") if counts[key])
    yield "examples", f"{examples:,}", f"of {counts['read']:,} read" + f" ({changed})" * bool(changed)
    online = config if isinstance(config, OnlineConfig) else None
    if online is None:
        yield "samples", f"{len(lengths):,}", f"{algo.group_size} per example"
        note = f"{counted:,} trained on; "
    else:
        yield completions_row(online)
        note = f"of prompts; at most {online.rollout.max_tokens:,} per completion; "
    mean, sample = tokens / len(lengths), "sample" if online is None else "prompt"
    yield "tokens", f"{tokens:,}", f"{note}{mean:,.0f} per {sample} on average, {lengths.max():,} at most"
    epochs = data.examples_after[-1] / data.stream.examples_per_epoch
    note = f"of {config.train.batch_size} examples: {epochs:.2f} epochs"
    note += f", {data.examples_after[-1] / examples * tokens:,.0f} tokens" if online is None else ""
    yield "steps", f"{data.steps:,}", note


def micro_batch_rows(config: Config, data: RunData, batches: MicroBatches) -> Iterator[Row]:
    """Yield the number of micro-batches per step, and the size of the largest."""
    sharding, counts = sharding_of(config), batches.counts
    limit, largest = config.train.micro_batch_tokens * sharding.context, sum(map(len, batches.largest))
    note = "per device, " if sharding.data_parallel_size > 1 else ""
    note += f"{min(counts)} to {max(counts)}, " if min(counts) < max(counts) else ""
    note += f"of at most {limit:,} tokens"
    note += f"; counted in the first {len(counts)} steps" if len(counts) < data.steps else ""
    yield "micro-batches per step", f"{sum(counts) / len(counts):.1f}", note
    note = "tokens: one example exceeds train.micro_batch_tokens" if largest > limit else "tokens"
    yield "largest micro-batch", f"{largest:,}", note


def memory_rows(
    config: Config, algo: Algorithm, device: torch.device, needs: MemoryEstimate, largest: list[Sample]
) -> Iterator[Row]:
    """Yield what takes memory on a device that trains; `largest`: the samples of the largest micro-batch."""
    own, step = needs.model, needs.step
    on = config.model.gradient_checkpointing
    other = estimate_memory(with_model(config, gradient_checkpointing=not on), algo, device, largest).step.activations
    dtype = str(compute_dtype(config.model, device)).removeprefix("torch.")
    quantized = "4 bits; adapters and unquantized layers " * config.model.load_in_4bit
    yield "weights", format_size(own.weights), quantized + dtype
    divided = sharding_of(config).devices > 1
    note = "float32, this device's part" if divided else "float32"
    yield "master weights", format_size(own.masters), note if own.masters else "none: the weights are float32"
    yield "gradients", format_size(own.gradients), "float32"
    name, states = OPTIMIZERS[config.train.optimizer]
    yield name, format_size(own.optimizer), "in host memory" if "moments" in config.cluster.offload else states
    if own.average:
        yield "EMA", format_size(own.average), "float32"
    if needs.reference:
        yield "reference", format_size(needs.reference), "" if needs.reference_stays else "freed before the first step"
    if needs.critic:
        yield (
            "critic",
            format_size(needs.critic),
            "weights, master weights, gradients, optimizer, if as large as the policy",
        )
    if needs.teacher:
        yield "teacher", format_size(needs.teacher), ""
    if needs.gathered:
        yield "gathered", format_size(needs.gathered), "parameters of the layers in use, and gradients being reduced"
    if needs.engine:
        note = f"{format_size(needs.engine_weights)} of weights, the rest for the KV cache"
        note += "; while completions are generated" if needs.engine_sleeps else "; all the time"
        yield "vLLM", format_size(needs.engine), note
    if needs.sampler:
        yield (
            "generation weights",
            format_size(needs.sampler),
            f"a whole copy, {dtype}; none with cluster.rollout_devices",
        )
    if needs.quantized:
        yield (
            "8-bit weights",
            format_size(needs.quantized),
            "one byte per weight of the layers: rollout.quantization",
        )
    if needs.cache:
        yield (
            "KV cache",
            format_size(needs.cache),
            "of completions being generated; fewer at a time where memory is short",
        )
    note = f"{format_size(other)} {'without' if on else 'with'} model.gradient_checkpointing"
    if not step.peak:
        yield "activations", "?", "unknown: this architecture cannot be run without its weights"
        return
    tokens = -(-sum(map(len, largest)) // sharding_of(config).context)
    note += f"; {format_size(step.host)} more in host memory" if step.host else ""
    yield "activations", format_size(step.activations), f"of {tokens:,} tokens; {note}"
    yield "temporary buffers", format_size(step.peak - step.activations), "a chunk of logits, gradients in flight"


def verdict(
    config: Config, algo: Algorithm, device: torch.device, largest: list[Sample], needs: MemoryEstimate, available: int
) -> str:
    """Return one line: it fits, or the smallest change of options that makes it fit."""
    needs = without_cache(needs)
    total = format_size(needs.with_overhead)
    if not needs.step.peak:
        return f"It needs {total} of {format_size(available)}, plus activations, which could not be counted."
    full = [role for role in other_roles(config, algo, device, available) if not role.fits]
    if needs.fits(available) and not full:
        return f"It fits: about {total} of {format_size(available)}, including libraries and fragmentation."
    too_large = (
        f"It does not fit: it needs about {total}, and {memory.MARGIN:.0%} of {format_size(available)} stay free."
    )
    if full:
        found = f"{format_size(full[0].needed)}, and may have {format_size(max(0.0, full[0].limit))}"
        too_large = f"It does not fit: a device of the role {full[0].role} needs {found}."
    elif needs.engine_weights > (1 - memory.ENGINE_MARGIN) * needs.engine:
        weights = format_size(needs.engine_weights)
        too_large = f"It does not fit: vLLM has {format_size(needs.engine)} for {weights} of weights and the KV cache."
    options = fitting_options(config, algo, device, largest, available)
    if options is None:
        return f"{too_large} Use a smaller model, more devices or devices with more memory."
    words, by_itself = " ".join(options[0]), options[1] and config.train.fit_memory and device.type != "cpu"
    return f"{too_large} A run sets by itself: {words}" if by_itself else f"{too_large} It fits with {words}"


def parameter_counts(model: ModelMemory) -> str:
    trained = "" if model.trained == model.parameters else f", {model.trained:,} of them trained"
    return f"{model.parameters:,} parameters{trained}"


def format_seconds(seconds: float) -> str:
    return (
        f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"
    )


def format_size(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


def print_rows(title: str, rows: Iterable[Row]) -> None:
    print(f"{title}:")
    for name, value, note in rows:
        print(f"  {name:<22}{value:>14}  {note}".rstrip())
    print()
