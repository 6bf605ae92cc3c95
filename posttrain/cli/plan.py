"""`posttrain plan`: batches, steps and memory of a configuration. Reads data and the model's config, no weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from posttrain.algorithms import ALGORITHMS, Algorithm, OnlineAlgorithm
from posttrain.cli.doctor import device_memory
from posttrain.cluster.base import split_evenly
from posttrain.config.sections import Config, ModelConfig, OnlineConfig
from posttrain.core.devices import default_device
from posttrain.core.errors import UsageError
from posttrain.core.logging import quiet_libraries
from posttrain.core.types import Sample
from posttrain.data.packing import pack_into_micro_batches
from posttrain.engines.kv_cache import bytes_per_position
from posttrain.engines.local import default_slots
from posttrain.models import memory
from posttrain.models.loading import DTYPES
from posttrain.models.memory import MemoryEstimate, ModelMemory, PassMemory, Sharding
from posttrain.models.tokenizers import load_tokenizer
from posttrain.train.run_data import RunData, load_data

GIB = 2**30
STEPS_LOOKED_AT = 100

Row = tuple[str, str, str]

# Beyond what is counted: the device's own context or the libraries' code, and gaps that the allocator cannot use.
BASE_BYTES = GIB // 2
GAPS = 1.08


def plan(verb: str, config: Config, device_gib: float = 0.0) -> int:
    """Print the plan; whether it fits is in its last line. `device_gib`: of accelerators that are not here."""
    quiet_libraries()
    algo = ALGORITHMS[verb](config.algo)
    device = torch.device("cuda") if device_gib else default_device()
    model = memory.empty_model(config.model, algo.head, dtype_of(config.model, device))
    data, packs = None, Packs(counts=[], largest=invented_pack(config, algo))
    if config.data.train:
        data = load_data(config, algo, load_tokenizer(config.model), vocabulary_of(model))
        print(*data.train.descriptions, sep="\n")
        packs = look_at_packs(config, algo, data)
    print(f"{verb} of {config.model.path}: {size_of(memory.model_memory(model, average=False))}\n")
    print_rows("batches", batch_ledger(config, algo, data, packs))
    show_memory(config, algo, packs, device_gib)
    return 0


def show_memory(config: Config, algo: Algorithm, packs: Packs, device_gib: float) -> None:
    """What training takes, and in the last line whether it fits."""
    device = torch.device("cuda") if device_gib else default_device()
    needs = needs_of(config, algo, device, packs.largest)
    name, available = ("a device", round(device_gib * GIB)) if device_gib else device_memory(device)
    where = f"{'each of its devices' if sharding_of(config).devices > 1 else name} with {amount(available)}"
    print_rows(f"memory, on {where}", memory_ledger(config, algo, device, needs, packs.largest))
    print_rows("at the worst moment of", [(phase, amount(size), "") for phase, size in needs.phases.items()])
    others = list(other_places(config, algo, device))
    if others:
        print_rows("on devices of their own, each", others)
    print(verdict(config, algo, device, packs.largest, needs, available))


@dataclass(slots=True)
class Packs:
    """How the first steps are cut up."""

    counts: list[int]  # packs of each step, on the device that has the most
    largest: list[Sample]


def look_at_packs(config: Config, algo: Algorithm, data: RunData) -> Packs:
    """Cut the first steps up as the learner will."""
    packs = Packs(counts=[], largest=[])
    edges = data.examples_after[: STEPS_LOOKED_AT + 1]
    for before, after in pairwise(edges):
        samples, most = taken(config, data, after - before), 0
        sharding = sharding_of(config)
        for share in split_evenly(samples, sharding.data_parallel_size, algo.group_size):  # the longest queue decides
            places = pack_into_micro_batches(share, config.train.micro_batch_tokens * sharding.context, algo.group_size)
            parts = [[share[i] for i in part] for part in places]
            most = max(most, len(parts))
            packs.largest = max([packs.largest, *parts], key=lambda part: sum(map(len, part)))
        packs.counts.append(most)
    return packs


def taken(config: Config, data: RunData, rows: int) -> list[Sample]:
    """The samples of a step; where answers are still to be generated, as long as they may become."""
    if not isinstance(config, OnlineConfig):
        return data.stream.take(rows)
    samples = []
    for _ in range(rows):
        prompt = data.stream.rows[data.stream.next_row()[1]][0].tokens
        answer = np.zeros(config.rollout.max_tokens, dtype=np.int32)
        sample = Sample(
            tokens=np.concatenate([prompt, answer]), mask=np.arange(len(prompt) + len(answer)) >= len(prompt)
        )
        samples += [sample] * config.rollout.samples_per_prompt
    return samples


def invented_pack(config: Config, algo: Algorithm) -> list[Sample]:
    """The most that a pack may hold: rows of the greatest length, all of whose tokens count."""
    longest = config.data.max_length
    tokens = config.train.micro_batch_tokens * sharding_of(config).context
    rows = max(1, tokens // (longest * algo.group_size))
    sample = Sample(tokens=np.zeros(longest, dtype=np.int32), mask=np.arange(longest) > 0)
    return [sample] * (rows * algo.group_size)


def batch_ledger(config: Config, algo: Algorithm, data: RunData | None, packs: Packs) -> Iterator[Row]:
    train, sharding = config.train, sharding_of(config)
    if sharding.devices > 1:
        note = f"{sharding.data_parallel_size} of them see different samples"
        note += f", {sharding.context} divide the tokens of each" if sharding.context > 1 else ""
        note += f", {sharding.tensor} divide each layer" if sharding.tensor > 1 else ""
        note += ", each keeps some experts" if sharding.experts > 1 else ""
        yield "devices", f"{sharding.devices:,}", f"{note}; zero {sharding.zero}"
    if data is None:
        yield "rows", "?", "data.train is not given"
        yield "steps", f"{train.max_steps:,}" if train.max_steps else "?", f"of {train.batch_size} rows"
        if isinstance(config, OnlineConfig):
            answers = train.batch_size * config.rollout.samples_per_prompt
            yield "answers a step", f"{answers:,}", f"{config.rollout.samples_per_prompt} a prompt"
        yield "tokens a pack", f"{sum(map(len, packs.largest)):,}", "at most"
        return
    rows, counts = len(data.train.rows), data.train.counts
    lengths, counted = data.train.rows.lengths(), data.train.rows.counted()
    tokens = int(lengths.sum())
    online = config if isinstance(config, OnlineConfig) else None
    lost = ", ".join(f"{counts[key]:,} {key}" for key in ("truncated", "dropped", "quarantined") if counts[key])
    yield "rows", f"{rows:,}", f"of {counts['read']:,} read" + f" ({lost})" * bool(lost)
    if online is None:
        yield "samples", f"{len(lengths):,}", f"{algo.group_size} a row"
        count = f"{counted:,} count; "
    else:
        answers = train.batch_size * online.rollout.samples_per_prompt
        yield "answers a step", f"{answers:,}", f"{online.rollout.samples_per_prompt} a prompt"
        count = f"of prompts; an answer has at most {online.rollout.max_tokens:,}; "
    mean = tokens / len(lengths)
    yield (
        "tokens",
        f"{tokens:,}",
        f"{count}a {'prompt' if online else 'sample'} has {mean:,.0f}, at most {lengths.max():,}",
    )
    epochs = data.examples_after[-1] / data.stream.rows_per_epoch
    yield (
        "steps",
        f"{data.steps:,}",
        f"of {train.batch_size} rows: {epochs:.2f} epochs"
        + f", {data.examples_after[-1] / rows * tokens:,.0f} tokens" * (online is None),
    )
    mean = sum(packs.counts) / len(packs.counts)
    seen = f"; seen in the first {len(packs.counts)} steps" if len(packs.counts) < data.steps else ""
    spread = f"{min(packs.counts)} to {max(packs.counts)}, " if min(packs.counts) < max(packs.counts) else ""
    yield (
        f"packs a step{' each' * (sharding.data_parallel_size > 1)}",
        f"{mean:.1f}",
        f"{spread}of at most {train.micro_batch_tokens * sharding.context:,} tokens{seen}",
    )
    largest = sum(map(len, packs.largest))
    yield (
        "largest pack",
        f"{largest:,}",
        "tokens"
        + ", as one row is longer than the rest may be" * (largest > train.micro_batch_tokens * sharding.context),
    )
    if data.eval is not None:
        yield "evaluation rows", f"{len(data.eval.rows):,}", ""


def needs_of(config: Config, algo: Algorithm, device: torch.device, largest: list[Sample]) -> MemoryEstimate:
    """Memory of training with these options; without samples, of all but the passes."""
    dtype = dtype_of(config.model, device)
    in_4bit = config.model.load_in_4bit
    model = memory.empty_model(config.model, algo.head, dtype)
    teacher = frozen(config.model, algo.teacher_path(), dtype) if algo.teacher_path() else None
    if teacher is not None and vocabulary_of(teacher) != vocabulary_of(model):
        raise UsageError(
            f"algo.teacher {algo.teacher_path()} has a vocabulary of {vocabulary_of(teacher):,}, model.path "
            f"{config.model.path} of {vocabulary_of(model):,}: distillation needs the same one"
        )
    reference = None
    # With adapters the policy itself, without them, is the reference.
    if "ref_logprobs" in algo.needs() and (algo.reference_path() or not config.model.lora_rank):
        reference = frozen(config.model, algo.reference_path() or config.model.path, dtype)
    request = replace(algo.forward_request(lambda text: 0), router_loss=config.model.router_aux_loss_coef)
    step = PassMemory()
    if largest:
        # A few architectures decide by the values of tensors, which are not there; then this part stays unknown.
        with suppress(RuntimeError, NotImplementedError):
            how = {"kernels": device.type == "cuda", "sharded": sharding_of(config).devices > 1}
            step = memory.pass_memory(model, shortened(largest, sharding_of(config).context), request, teacher, **how)

    def weights(other: Any, role: str) -> int:
        if other is None:
            return 0
        sharding = sharding_of(config, role)
        if sharding.devices > 1:
            return memory.sharded_memory(other, sharding, average=False).weights
        return memory.model_memory(other, average=False, in_4bit=in_4bit).weights

    sharding, average = sharding_of(config), bool(config.train.ema_decay)
    whole = memory.model_memory(model, average=average, in_4bit=in_4bit)
    apart = {role for role in ("reference", "critic") if config.cluster.of(role).place != "actor"}
    if "reference" in config.cluster.offload:  # it comes when there are no gradients, which are larger
        apart.add("reference")
    own = memory.sharded_memory(model, sharding, average=average) if sharding.devices > 1 else whole
    if sharding.devices > 1 and "parameters" in config.cluster.offload:
        own = replace(own, weights=0, masters=0, gradients=0, optimizer=0, average=0)
    return MemoryEstimate(
        model=own,
        step=step,
        reference=0 if "reference" in apart else weights(reference, "reference"),
        reference_stays=not algo.precompute_reference(),
        teacher=weights(teacher, "actor"),
        critic=0 if "critic" in apart else critic_of(config, algo, dtype),
        gathered=memory.gathered_bytes(model, sharding) if sharding.devices > 1 else 0,
        sampler=whole.parameters * dtype.itemsize if has_sampler(config, sharding) else 0,
        cache=cache_of(config, model.config, device, dtype, largest),
    )


def sharding_of(config: Config, role: str = "actor") -> Sharding:
    """How the devices of a role divide its model."""
    found = config.cluster.of(role)
    data, tensor, context = found.devices // found.tensor_parallel, found.tensor_parallel, found.context_parallel
    return Sharding(data, tensor, found.zero, context, found.expert_parallel)


def shortened(samples: list[Sample], ranks: int) -> list[Sample]:
    """What one of several context ranks computes: fewer tokens of each, and as many that count as there may be."""
    if ranks == 1:
        return samples
    found = []
    for sample in samples:
        size = max(2, -(-len(sample) // ranks))
        counted = min(size - 1, int(sample.mask.sum()))
        found.append(Sample(tokens=sample.tokens[:size], mask=np.arange(size) >= size - counted))
    return found


def has_sampler(config: Config, sharding: Sharding) -> bool:
    """Whether the learners keep a whole copy to generate with."""
    if not isinstance(config, OnlineConfig) or config.cluster.of("rollout").place != "actor":
        return False
    return sharding.devices > 1 or bool(config.rollout.ahead)


def cache_of(config: Config, model: Any, device: torch.device, dtype: torch.dtype, largest: list[Sample]) -> int:
    """Keys and values of the answers under way, where the learners' devices generate with the local engine."""
    if not isinstance(config, OnlineConfig) or config.rollout.engine != "local":
        return 0
    if config.cluster.of("rollout").place != "actor":
        return 0
    answers = config.train.batch_size * config.rollout.samples_per_prompt
    longest = max(map(len, largest), default=config.data.max_length + config.rollout.max_tokens)
    a_slot = longest * bytes_per_position(model.get_text_config(), dtype)
    return min(default_slots(device), -(-answers // sharding_of(config).devices)) * a_slot


def critic_of(config: Config, algo: Algorithm, dtype: torch.dtype) -> int:
    """A critic is trained like the policy: weights, masters, gradients, AdamW."""
    if not isinstance(algo, OnlineAlgorithm) or algo.critic() is None:
        return 0
    model, sharding = memory.empty_model(config.model, "score", dtype), sharding_of(config, "critic")
    whole = memory.model_memory(model, average=False)
    own = memory.sharded_memory(model, sharding, average=False) if sharding.devices > 1 else whole
    return own.weights + own.masters + own.gradients + own.optimizer


def other_places(config: Config, algo: Algorithm, device: torch.device) -> Iterator[Row]:
    """Devices that do not hold the policy."""
    dtype = dtype_of(config.model, device)
    for role in config.cluster.own_devices():
        found, sharding = config.cluster.of(role), sharding_of(config, role)
        if role == "rollout":
            size = frozen(config.model, config.model.path, dtype)
            weights = memory.model_memory(size, average=False).weights // found.tensor_parallel
            number = found.devices // found.tensor_parallel
            engines = f"{number:,} engine{'s' * (number > 1)}"
            engines += f" of {found.tensor_parallel} devices" if found.tensor_parallel > 1 else ""
            yield role, amount(weights), f"{engines}; what is left holds keys and values of answers"
        elif role == "critic":
            critic = memory.empty_model(config.model, "score", dtype)
            more = memory.gathered_bytes(critic, sharding) if sharding.devices > 1 else 0
            yield role, amount(critic_of(config, algo, dtype) + more), f"{found.devices:,} devices; and activations"
        elif role == "reference":
            model = frozen(config.model, algo.reference_path() or config.model.path, dtype)
            whole = memory.model_memory(model, average=False).weights
            divided = memory.sharded_memory(model, sharding, average=False).weights
            divided += memory.gathered_bytes(model, sharding)
            yield role, amount(divided if sharding.devices > 1 else whole), f"{found.devices:,} devices"
        else:
            yield role, "?", f"{found.devices:,} devices; as large as the reward models are"


def frozen(config: ModelConfig, path: str, dtype: torch.dtype) -> Any:
    return memory.empty_model(replace(config, path=path, lora_rank=0), "token", dtype, trainable=False)


def vocabulary_of(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def dtype_of(config: ModelConfig, device: torch.device) -> torch.dtype:
    return DTYPES.get(config.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def memory_ledger(
    config: Config, algo: Algorithm, device: torch.device, needs: MemoryEstimate, largest: list[Sample]
) -> Iterator[Row]:
    own, step = needs.model, needs.step
    on = config.model.gradient_checkpointing
    other = needs_of(with_model(config, gradient_checkpointing=not on), algo, device, largest).step.activations
    dtype = str(dtype_of(config.model, device)).removeprefix("torch.")
    yield "weights", amount(own.weights), "4 bits, adapters and the rest " * config.model.load_in_4bit + dtype
    divided = sharding_of(config).devices > 1
    alone = "the weights are float32 themselves"
    yield (
        "masters",
        amount(own.masters),
        ("float32, this device's part" if divided else "float32") if own.masters else alone,
    )
    yield "gradients", amount(own.gradients), "float32"
    yield "AdamW", amount(own.optimizer), "two float32 averages"
    if own.average:
        yield "EMA", amount(own.average), "float32"
    if needs.reference:
        yield "reference", amount(needs.reference), "" if needs.reference_stays else "freed before the first step"
    if needs.critic:
        yield "critic", amount(needs.critic), "weights, masters, gradients and AdamW, if it is as large as the policy"
    if needs.teacher:
        yield "teacher", amount(needs.teacher), ""
    if needs.gathered:
        yield "gathered", amount(needs.gathered), "others' parts of the layers in use, and gradients on their way"
    if needs.sampler:
        yield "to generate with", amount(needs.sampler), f"a whole copy, {dtype}; none with cluster.rollout_devices"
    if needs.cache:
        yield "keys and values", amount(needs.cache), "of answers under way; as many as memory has room for"
    note = f"{amount(other)} {'without' if on else 'with'} model.gradient_checkpointing"
    if not step.peak:
        yield "activations", "?", "this architecture cannot be run without its weights"
        return
    tokens = -(-sum(map(len, largest)) // sharding_of(config).context)
    yield "activations", amount(step.activations), f"of {tokens:,} tokens; {note}"
    yield "passing", amount(step.peak - step.activations), "a chunk of logits, gradients on their way"


def verdict(
    config: Config, algo: Algorithm, device: torch.device, largest: list[Sample], needs: MemoryEstimate, available: int
) -> str:
    """One line: it fits, or the mildest change that makes it fit."""
    there_is = amount(available)
    if not needs.step.peak:
        return f"It takes {amount(in_all(needs.peak))} of {there_is}, and activations, which could not be counted."
    if in_all(needs.peak) <= available:
        return f"It fits: about {amount(in_all(needs.peak))} of {there_is}, with what libraries and gaps take."
    misfit = f"It does not fit: about {amount(in_all(needs.peak))}, there are {there_is}."

    def fits(needs: MemoryEstimate) -> bool:
        return in_all(needs.peak) <= available

    for weights in less_to_train(config):
        changed = with_model(config, **weights)
        if not fits(needs_of(changed, algo, device, [])):  # no batch is small enough
            continue
        for checkpointing, budget, rows in less_to_keep(changed, algo, largest):
            if fits(needs_of(with_model(changed, gradient_checkpointing=checkpointing), algo, device, rows)):
                options = [f"--model.{name}" + f" {value}" * (value is not True) for name, value in weights.items()]
                if checkpointing and not config.model.gradient_checkpointing:
                    options.append("--model.gradient_checkpointing")
                if budget != config.train.micro_batch_tokens:
                    options.append(f"--train.micro_batch_tokens {budget}")
                return f"{misfit} It would with {' '.join(options)}"
    return f"{misfit} Take a smaller model or a device with more memory."


def in_all(size: int) -> float:
    return GAPS * size + BASE_BYTES


def less_to_train(config: Config) -> Iterator[dict[str, Any]]:
    """Changes of the model section, from none to the most saving."""
    yield {}
    if find_spec("peft") is None:
        return
    adapters = {} if config.model.lora_rank else {"lora_rank": 16}
    if adapters:
        yield adapters
    if not config.model.load_in_4bit:
        yield {**adapters, "load_in_4bit": True}


def less_to_keep(config: Config, algo: Algorithm, largest: list[Sample]) -> Iterator[tuple[bool, int, list[Sample]]]:
    """(checkpointing, tokens a pack, the largest such pack), from what there is to a pack of one row."""
    budget = config.train.micro_batch_tokens
    if not config.model.gradient_checkpointing:
        yield False, budget, largest
    yield True, budget, largest
    size = algo.group_size
    rows = sorted((largest[i : i + size] for i in range(0, len(largest), size)), key=lambda row: -sum(map(len, row)))
    while len(rows) > 1:
        budget //= 2
        while len(rows) > 1 and sum(len(sample) for row in rows for sample in row) > budget:
            rows.pop()
        yield True, budget, [sample for row in rows for sample in row]


def with_model(config: Config, **options: Any) -> Config:
    return replace(config, model=replace(config.model, **options))


def size_of(standing: ModelMemory) -> str:
    trained = "" if standing.trained == standing.parameters else f", {standing.trained:,} of them trained"
    return f"{standing.parameters:,} parameters{trained}"


def amount(size: float) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.1f} MiB"


def print_rows(title: str, rows: Any) -> None:
    print(f"{title}:")
    for name, value, note in rows:
        print(f"  {name:<22}{value:>14}  {note}".rstrip())
    print()
