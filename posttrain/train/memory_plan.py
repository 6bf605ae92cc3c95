"""Estimates the memory of a training step from the configuration, and makes a step that does not fit smaller.

`posttrain plan` prints the estimate; every run on an accelerator uses it before it loads the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from posttrain.algorithms import Algorithm, OnlineAlgorithm
from posttrain.algorithms.opd import SELF, is_address
from posttrain.cluster.base import split_evenly
from posttrain.config.sections import Config, ModelConfig, OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.core.host import host_memory
from posttrain.core.types import Sample
from posttrain.data.packing import pack_into_micro_batches
from posttrain.engines.kv_cache import bytes_per_position, keeps_latents
from posttrain.engines.local import default_slots
from posttrain.engines.vllm.options import VLLM_SHARE_BESIDE
from posttrain.models import memory
from posttrain.models.freezing import without_freezing
from posttrain.models.loading import compute_dtype
from posttrain.models.memory import MemoryEstimate, PassMemory, Sharding
from posttrain.nn.optimizer import STAGED_BYTES
from posttrain.parallel.pipeline import passes_in_flight
from posttrain.parallel.tensor import mark_blocks
from posttrain.train.layout_check import vllm_engine_size
from posttrain.train.run_data import RunData

STEPS_PACKED = 100  # steps of a run whose micro-batches are counted
HOST_SHARE = 0.7  # of host memory that moments may take
FAST_TOKENS = 2048
"""Micro-batches of this size still keep a GPU busy: down to it, smaller ones cost less time than recomputation."""


@dataclass(slots=True, frozen=True, kw_only=True)
class StepSize:
    """What bounds the memory of a step and does not change its result."""

    micro_batch_tokens: int
    gradient_checkpointing: bool = False
    host_activations: bool = False
    host_moments: bool = False

    @classmethod
    def of(cls, config: Config) -> StepSize:
        return cls(
            micro_batch_tokens=config.train.micro_batch_tokens,
            gradient_checkpointing=config.model.gradient_checkpointing,
            host_activations="activations" in config.cluster.offload,
            host_moments="moments" in config.cluster.offload,
        )

    def applied(self, config: Config) -> Config:
        """Return the configuration with these options set."""
        train = replace(config.train, micro_batch_tokens=self.micro_batch_tokens)
        changed = replace(with_model(config, gradient_checkpointing=self.gradient_checkpointing), train=train)
        return with_offload(changed, *self.offloaded())

    def offloaded(self) -> list[str]:
        """Return what is in host memory, by the names of cluster.offload."""
        return ["activations"] * self.host_activations + ["moments"] * self.host_moments

    def options(self, config: Config) -> list[str]:
        """Return the options that differ from the configuration, as on the command line."""
        options = []
        if self.gradient_checkpointing and not config.model.gradient_checkpointing:
            options.append("--model.gradient_checkpointing")
        if self.micro_batch_tokens != config.train.micro_batch_tokens:
            options.append(f"--train.micro_batch_tokens {self.micro_batch_tokens}")
        offload = with_offload(config, *self.offloaded()).cluster.offload
        if offload != config.cluster.offload:
            options.append(f"--cluster.offload {' '.join(offload)}")
        return options


def fit_to_memory(config: Config, algo: Algorithm, device: torch.device, data: RunData, available: int) -> Config:
    """Return the configuration with the options of `fitting_step`, if a step would not fit.

    They do not change results. Where nothing fits, or the memory cannot be estimated, the configuration stays as it is.
    """
    position = data.stream.position
    largest = pack_first_steps(config, algo, data).largest
    data.stream.position = position
    needs = without_cache(estimate_memory(config, algo, device, largest, available))
    if not needs.step.peak or needs.fits(available):
        return config
    found = fitting_step(config, algo, device, largest, available)
    return config if found is None else found.applied(config)


def fitting_step(
    config: Config, algo: Algorithm, device: torch.device, largest: list[Sample], available: int
) -> StepSize | None:
    """Return the fastest step that fits, None if none does.

    In this order: smaller micro-batches, gradient checkpointing, its inputs in host memory, AdamW's moments there.
    """
    context = sharding_of(config).context
    sizes = list(smaller_micro_batches(config.train.micro_batch_tokens, algo.group_size, largest, context))
    for host_moments in (False, True):
        if host_moments and not can_offload_moments(config, algo, device):
            return None
        changed = with_offload(config, "moments") if host_moments else config
        if not without_cache(estimate_memory(changed, algo, device, [], available)).fits(available):
            continue  # no micro-batch is small enough
        for checkpointing, host_activations in ways_to_save(config, device):
            changed = with_model(changed, gradient_checkpointing=checkpointing)
            changed = with_offload(changed, "activations") if host_activations else changed
            for tokens, samples in sizes:
                if not checkpointing and tokens < min(FAST_TOKENS, config.train.micro_batch_tokens):
                    break
                needs = without_cache(estimate_memory(changed, algo, device, samples, available))
                if not needs.step.peak:  # it cannot be counted
                    return None
                if needs.fits(available) and fits_host(needs.step.host, config):
                    return StepSize(
                        micro_batch_tokens=tokens,
                        gradient_checkpointing=checkpointing,
                        host_activations=host_activations,
                        host_moments=host_moments,
                    )
    return None


def ways_to_save(config: Config, device: torch.device) -> list[tuple[bool, bool]]:
    """Return whether activations are checkpointed and offloaded: at least as the configuration says, in this order."""
    ways = [(False, False), (True, False), (True, True)]
    configured = config.model.gradient_checkpointing, "activations" in config.cluster.offload
    found = ways[ways.index(configured) :] if configured in ways else ways[2:]
    return [way for way in found if device.type != "cpu" or way[1] == configured[1]]


def with_offload(config: Config, *parts: str) -> Config:
    """Return the configuration with more in host memory."""
    offload: Any = tuple(dict.fromkeys((*config.cluster.offload, *parts)))
    return replace(config, cluster=replace(config.cluster, offload=offload))


def can_offload_moments(config: Config, algo: Algorithm, device: torch.device) -> bool:
    """Whether the optimizer is AdamW, and host memory holds the moments of every process on this machine."""
    if device.type == "cpu" or "parameters" in config.cluster.offload or config.train.optimizer != "adamw":
        return False
    moments = estimate_memory(
        replace(config, cluster=replace(config.cluster, offload=())), algo, device, []
    ).model.optimizer
    return fits_host(moments, config)


def fits_host(size: int, config: Config) -> bool:
    """Whether host memory has room for this many bytes of every process on this machine."""
    processes = max(1, torch.accelerator.device_count()) if sharding_of(config).devices > 1 else 1
    return size * processes < HOST_SHARE * host_memory()


def smaller_micro_batches(
    budget: int, group_size: int, largest: list[Sample], context: int = 1
) -> Iterator[tuple[int, list[Sample]]]:
    """Yield the token budget and the largest micro-batch that it allows, halved down to a single example.

    `context`: the devices that share a micro-batch; the budget is for each of them.
    """
    yield budget, largest
    groups = [largest[i : i + group_size] for i in range(0, len(largest), group_size)]
    groups.sort(key=lambda group: -sum(map(len, group)))
    while len(groups) > 1:
        budget //= 2
        while len(groups) > 1 and sum(len(sample) for group in groups for sample in group) > budget * context:
            groups.pop()
        yield budget, [sample for group in groups for sample in group]


def without_cache(needs: MemoryEstimate) -> MemoryEstimate:
    """Leave the KV cache out, which takes what training leaves free."""
    return replace(needs, cache=0)


@dataclass(slots=True)
class MicroBatches:
    """How the first steps are packed."""

    counts: list[int]  # micro-batches of each step, on the device that has the most
    largest: list[Sample]  # the samples of the micro-batch with the most tokens


def pack_first_steps(config: Config, algo: Algorithm, data: RunData) -> MicroBatches:
    """Pack the first steps as the learner will."""
    batches = MicroBatches(counts=[], largest=[])
    edges = data.examples_after[: STEPS_PACKED + 1]
    for before, after in pairwise(edges):
        samples, most = samples_of_step(config, data, after - before), 0
        sharding = sharding_of(config)
        for share in split_evenly(samples, sharding.data_parallel_size, algo.group_size):  # the busiest device decides
            packed = pack_into_micro_batches(share, config.train.micro_batch_tokens * sharding.context, algo.group_size)
            parts = [[share[i] for i in part] for part in packed]
            most = max(most, len(parts))
            batches.largest = max([batches.largest, *parts], key=lambda part: sum(map(len, part)))
        batches.counts.append(most)
    return batches


def samples_of_step(config: Config, data: RunData, examples: int) -> list[Sample]:
    """Return the samples of a step; completions that are still to be generated have their greatest length."""
    if not isinstance(config, OnlineConfig):
        return data.stream.take(examples)
    samples = []
    for _ in range(examples):
        prompt = data.stream.examples[data.stream.next_index()[1]][0].tokens
        completion = np.zeros(config.rollout.max_tokens, dtype=np.int32)
        tokens = np.concatenate([prompt, completion])
        sample = Sample(tokens=tokens, mask=np.arange(len(tokens)) >= len(prompt))
        samples += [sample] * config.rollout.samples_per_prompt
    return samples


def full_micro_batch(config: Config, algo: Algorithm) -> list[Sample]:
    """Return the largest micro-batch: examples of the greatest length, all of whose tokens are trained on."""
    longest = config.data.max_length
    tokens = config.train.micro_batch_tokens * sharding_of(config).context
    examples = max(1, tokens // (longest * algo.group_size))
    sample = Sample(tokens=np.zeros(longest, dtype=np.int32), mask=np.arange(longest) > 0)
    return [sample] * (examples * algo.group_size)


def estimate_memory(
    config: Config, algo: Algorithm, device: torch.device, largest: list[Sample], available: int = 0
) -> MemoryEstimate:
    """Estimate the memory of training on one device; without samples, without that of the forward and backward pass.

    `available`: the device's memory, of which a vLLM engine beside the policy takes a share.
    """
    dtype = compute_dtype(config.model, device)
    sharding, average = sharding_of(config), bool(config.train.ema_decay)
    model = memory.counted_model(config.model, algo.head, dtype)
    teacher = teacher_model(config, algo, model, dtype)
    in_4bit, several = config.model.load_in_4bit, sharding.devices > 1
    whole = memory.kept(
        ("whole", id(model), average, in_4bit, config.train.optimizer),
        lambda: memory.model_memory(model, average=average, in_4bit=in_4bit, optimizer=config.train.optimizer),
    )
    own, gathered = whole, 0
    if several:
        own, gathered = memory.kept(
            ("sharded", id(model), sharding, average),
            lambda: (
                memory.sharded_memory(model, sharding, average=average),
                memory.gathered_bytes(model, sharding),
            ),
        )
    if several and "parameters" in config.cluster.offload:
        own = replace(own, weights=0, masters=0, gradients=0, optimizer=0, average=0)
    staged = 0
    if "moments" in config.cluster.offload:
        own, staged = replace(own, optimizer=0), STAGED_BYTES
    copy_bytes = whole.parameters * dtype.itemsize
    share, sleeps = vllm_share(config, device)
    return MemoryEstimate(
        engine=round(share * available),
        engine_weights=copy_bytes // vllm_engine_size(config) if share and available else 0,
        engine_sleeps=sleeps,
        optimizer_leaves="optimizer" in config.cluster.offload or "policy" in config.cluster.offload,
        model=own,
        step=kept_pass(config, algo, device, largest),
        reference=reference_bytes(config, algo, dtype),
        reference_stays=not algo.precompute_reference(),
        teacher=asked_teacher_bytes(config, algo, dtype) if teacher is None else weight_bytes(config, teacher, "actor"),
        critic=critic_bytes(config, algo, dtype) if shares_learners(config, "critic") else 0,
        gathered=gathered,
        sampler=copy_bytes if keeps_weight_copy(config, sharding) else 0,
        quantized=memory.eight_bit_bytes(model) if generates_in_8_bits(config, "actor") else 0,
        sampler_leaves=frees_weight_copy(config, sharding),
        cache=kv_cache_bytes(config, model.config, device, dtype, largest),
        staged=min(staged, 8 * whole.trained),
    )


def teacher_model(config: Config, algo: Algorithm, model: Any, dtype: torch.dtype) -> Any | None:
    """Return the teacher without storage, if the algorithm has one; it must have the vocabulary of `model`."""
    if not algo.teacher_path():
        return None
    teacher = frozen_model(config.model, algo.teacher_path(), dtype)
    if vocabulary_of(teacher) != vocabulary_of(model):
        raise UsageError(
            f"algo.teacher {algo.teacher_path()} has a vocabulary of {vocabulary_of(teacher):,}, model.path "
            f"{config.model.path} of {vocabulary_of(model):,}: distillation needs the same one"
        )
    return teacher


def kept_pass(config: Config, algo: Algorithm, device: torch.device, samples: list[Sample]) -> PassMemory:
    """Return `estimate_pass`, counted once for equal micro-batches inside of memory.keep_estimates."""
    if not samples:
        return PassMemory()
    sharding, sizes = sharding_of(config), tuple((len(sample), int(sample.mask.sum())) for sample in samples)
    stages = sharding.pipeline, sharding.virtual, sharding.layers_per_stage
    divided = (
        sharding.token_ranks,
        sharding.sequence,
        sharding.devices > 1,
        stages,
        offloads_activations(config, device),
    )
    key = ("pass", astuple(config.model), type(algo), device.type, sizes, divided)
    return memory.kept(key, lambda: estimate_pass(config, algo, device, samples))


def estimate_pass(config: Config, algo: Algorithm, device: torch.device, samples: list[Sample]) -> PassMemory:
    """Estimate the memory of a forward and backward pass over a micro-batch; zeros if it cannot be counted."""
    sharding, dtype = sharding_of(config), compute_dtype(config.model, device)
    model, teacher = memory.empty_model(config.model, algo.head, dtype), None
    if algo.teacher_path():
        own = replace(config.model, path=algo.teacher_path(), lora_rank=0)
        teacher = memory.empty_model(own, "token", dtype, trainable=False)
    if sharding.tensor > 1:
        for divided in (model, *([] if teacher is None else [teacher])):
            mark_blocks(divided, sequence=sharding.sequence)
    request = replace(algo.forward_request(lambda text: 0), router_loss=config.model.router_aux_loss_coef)
    # A few architectures branch on values of tensors, which do not exist here.
    with suppress(RuntimeError, NotImplementedError):
        one = memory.pass_memory(
            model,
            with_listed_tokens(context_slice(samples, sharding.token_ranks), algo),
            request,
            teacher,
            kernels=device.type == "cuda",
            sharded=sharding.devices > 1,
            offload=offloads_activations(config, device),
        )
        return pipelined_pass(one, model, sharding)
    return PassMemory()


def offloads_activations(config: Config, device: torch.device) -> bool:
    """Whether the inputs of checkpointed layers are kept in host memory; on a CPU they are there anyway."""
    return "activations" in config.cluster.offload and config.model.gradient_checkpointing and device.type != "cpu"


def pipelined_pass(one: PassMemory, model: Any, sharding: Sharding) -> PassMemory:
    """Return the memory of the micro-batches that are in flight in the busiest pipeline rank, from that of a pass."""
    if sharding.pipeline == 1:
        return one
    layers = model.config.get_text_config().num_hidden_layers
    share = passes_in_flight(layers, sharding.pipeline, sharding.virtual, sharding.layers_per_stage)
    activations = round(one.activations * share)
    host = round(one.host * share)
    return replace(one, activations=activations, peak=one.peak - one.activations + activations, host=host)


def with_listed_tokens(samples: list[Sample], algo: Algorithm) -> list[Sample]:
    """Add the likeliest tokens of a teacher, where the loss reads them."""
    settings = algo.teachers() if isinstance(algo, OnlineAlgorithm) else None
    if settings is None or not settings.top_k:
        return samples
    shapes = [(len(sample), settings.top_k) for sample in samples]
    return [
        replace(sample, teacher_ids=np.zeros(shape, np.int32), teacher_logprobs=np.full(shape, -9.0, np.float32))
        for sample, shape in zip(samples, shapes, strict=True)
    ]


def asked_teacher_bytes(config: Config, algo: Algorithm, dtype: torch.dtype) -> int:
    """Return the memory of the teachers that are asked before the update and are models to load."""
    settings = algo.teachers() if isinstance(algo, OnlineAlgorithm) else None
    if settings is None or not shares_learners(config, "reference") or "reference" in config.cluster.offload:
        return 0
    paths = [path for path in settings.teachers if path != SELF and not is_address(path)]
    return sum(weight_bytes(config, frozen_model(config.model, path, dtype), "reference") for path in paths)


def reference_bytes(config: Config, algo: Algorithm, dtype: torch.dtype) -> int:
    """Return the memory of the reference beside the learners; with adapters it is the policy without them."""
    if "ref_logprobs" not in algo.needs() or (config.model.lora_rank and not algo.reference_path()):
        return 0
    # With offload it is on the device only while there are no gradients, which are larger.
    if not shares_learners(config, "reference") or "reference" in config.cluster.offload:
        return 0
    model = frozen_model(config.model, algo.reference_path() or config.model.path, dtype)
    return weight_bytes(config, model, "reference")


def weight_bytes(config: Config, model: Any, role: str) -> int:
    """Return the memory of the weights of a frozen model on one device of its role."""
    sharding = sharding_of(config, role)
    if sharding.devices > 1:
        return memory.sharded_memory(model, sharding, average=False).weights
    return memory.model_memory(model, average=False, in_4bit=config.model.load_in_4bit).weights


def shares_learners(config: Config, role: str) -> bool:
    """Whether a role is on the devices that train the policy."""
    return config.cluster.of(role).place == "actor"


def sharding_of(config: Config, role: str = "actor") -> Sharding:
    """Return how the devices of a role divide its model."""
    found = config.cluster.of(role)
    tensor, context = found.tensor_parallel, found.context_parallel
    data = found.devices // tensor // found.pipeline_parallel
    deferred = config.cluster.defer_gradient_reduction
    stages = found.pipeline_parallel, found.virtual_stages, found.layers_per_stage
    return Sharding(
        *(data, tensor, found.zero, context, found.expert_parallel, found.replicate, deferred, *stages),
        ulysses=found.ulysses_degree,
        sequence=config.cluster.sequence_parallel and tensor > 1,
        in_host="parameters" in config.cluster.offload,
    )


def context_slice(samples: list[Sample], ranks: int) -> list[Sample]:
    """Return the part of one of the ranks that divide tokens: fewer of each sample, as many trained on as possible."""
    if ranks == 1:
        return samples
    found = []
    for sample in samples:
        size = max(2, -(-len(sample) // ranks))
        counted = min(size - 1, int(sample.mask.sum()))
        found.append(Sample(tokens=sample.tokens[:size], mask=np.arange(size) >= size - counted))
    return found


def keeps_weight_copy(config: Config, sharding: Sharding) -> bool:
    """Whether the learners keep a whole copy of the weights to generate with the local engine."""
    if not isinstance(config, OnlineConfig) or not shares_learners(config, "rollout"):
        return False
    return config.rollout.engine == "local" and (sharding.devices > 1 or bool(config.rollout.ahead))


def frees_weight_copy(config: Config, sharding: Sharding) -> bool:
    """Whether the learners free that copy while they train."""
    on_policy = isinstance(config, OnlineConfig) and not config.rollout.ahead
    return on_policy and "engine" in config.cluster.offload and keeps_weight_copy(config, sharding)


def generates_in_8_bits(config: Config, place: str) -> bool:
    """Whether the local engine on the devices of a role computes with 8-bit copies of the weights."""
    if not isinstance(config, OnlineConfig) or config.rollout.engine != "local":
        return False
    return config.rollout.quantization == "fp8" and config.cluster.of("rollout").place == place


def vllm_share(config: Config, device: torch.device) -> tuple[float, bool]:
    """Return the share of the device's memory that vLLM takes beside the policy, and whether it sleeps in between."""
    if not isinstance(config, OnlineConfig) or config.rollout.engine != "vllm" or device.type == "cpu":
        return 0.0, True
    if not shares_learners(config, "rollout"):
        return 0.0, True
    options = {"gpu_memory_utilization": VLLM_SHARE_BESIDE, "enable_sleep_mode": True} | config.rollout.vllm_options
    return float(options["gpu_memory_utilization"]), str(options["enable_sleep_mode"]).lower() == "true"


def kv_cache_bytes(config: Config, model: Any, device: torch.device, dtype: torch.dtype, largest: list[Sample]) -> int:
    """Return the size of the KV cache, if the learners' devices generate with the local engine."""
    if not isinstance(config, OnlineConfig) or config.rollout.engine != "local":
        return 0
    if not shares_learners(config, "rollout"):
        return 0
    completions = config.train.batch_size * config.rollout.samples_per_prompt
    longest = max(map(len, largest), default=config.data.max_length + config.rollout.max_tokens)
    text_config = model.get_text_config()
    latents, rounded = keeps_latents(text_config, device), config.rollout.kv_cache_dtype == "fp8"
    slot = longest * bytes_per_position(text_config, dtype, latents=latents, rounded=rounded)
    return min(default_slots(device), -(-completions // sharding_of(config).devices)) * slot


def critic_bytes(config: Config, algo: Algorithm, dtype: torch.dtype) -> int:
    """Return the memory of a critic, which is trained like the policy: weights, master weights, gradients, AdamW."""
    if not isinstance(algo, OnlineAlgorithm) or algo.critic() is None:
        return 0
    model = memory.counted_model(without_freezing(config.model), "score", dtype)
    sharding = sharding_of(config, "critic")
    whole = memory.model_memory(model, average=False, optimizer=config.train.optimizer)
    own = memory.sharded_memory(model, sharding, average=False) if sharding.devices > 1 else whole
    return own.weights + own.masters + own.gradients + own.optimizer


def frozen_model(config: ModelConfig, path: str, dtype: torch.dtype) -> Any:
    """Return a language model that is not trained, without storage for its weights."""
    return memory.counted_model(replace(config, path=path, lora_rank=0), "token", dtype, trainable=False)


def vocabulary_of(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[0]


def with_model(config: Config, **options: Any) -> Config:
    return replace(config, model=replace(config.model, **options))
