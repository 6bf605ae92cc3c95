"""Estimates the memory of a training step without loading any weights.

Of P parameters A are trained (all of them without adapters); a weight has e bytes (2 in bfloat16, 4 in float32):

    weights      e P                           with model.load_in_4bit 4.13 bits per number in the linear layers
    masters      4 A                           if the trained weights are not float32 themselves
    gradients    4 A                           from the first backward pass of a step to the optimizer step
    AdamW        8 A + 4 per trained tensor    two moments, and a step counter; other optimizers: nn/optimizer_rules.py
    EMA          4 A                           with train.ema_decay
    helpers      e P                           a reference or a teacher

These are exact. What a forward and backward pass allocates in addition depends on the architecture, so no formula is
used: the model's own code runs on tensors without storage (torch's meta device), and its allocations are counted.
Not counted are temporaries inside fused kernels and the allocator's fragmentation.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from posttrain.config.sections import ModelConfig
from posttrain.core.types import ForwardRequest, Head, MicroBatch, Sample
from posttrain.data.packing import collate
from posttrain.models import adapters, loading, paths
from posttrain.models.freezing import freeze_weights
from posttrain.nn import attention
from posttrain.nn.activation_offload import CountedOffload
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.kernels import meta
from posttrain.nn.layers import use_fused_layers
from posttrain.nn.lm_head import FusedHead
from posttrain.nn.optimizer import accumulate_into
from posttrain.nn.optimizer_rules import embedding_names, layer_of, rule_for, state_bytes
from posttrain.nn.weights import MASTER
from posttrain.parallel.expert import experts_of
from posttrain.parallel.pipeline import parameters_of_rank

# 4 bits per number, an 8-bit scale per block of 64 numbers, and a 32-bit scale per 256 of those scales.
BITS_IN_4BIT = 4 + 8 / 64 + 32 / (64 * 256)
BASE_BYTES = 2**29  # the device's context, or the libraries' code
MARGIN = 0.05  # of a device's memory that stays free for what is not counted
ENGINE_MARGIN = 0.1  # of vLLM's memory that must be left for the KV cache
HELD_GAPS, PASS_GAPS = 1.01, 1.15  # the allocator's blocks are larger than the tensors in them


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelMemory:
    """Bytes that training holds for a model, independent of the batch."""

    parameters: int  # a count, not bytes
    trained: int  # likewise
    weights: int
    masters: int
    gradients: int
    optimizer: int
    average: int


@dataclass(slots=True, frozen=True, kw_only=True)
class PassMemory:
    """Bytes that one forward and backward pass over a micro-batch allocates; all 0: unknown."""

    activations: int = 0  # saved from the forward to the backward pass
    peak: int = 0  # at the worst moment: activations, a chunk of logits, gradients being computed
    forward_only: int = 0  # peak of a pass that saves nothing: evaluation, or a reference model
    host: int = 0  # inputs of layers in host memory: cluster.offload activations


@dataclass(slots=True, frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of everything on the training device, and how much of it exists at the same time."""

    model: ModelMemory
    step: PassMemory
    reference: int = 0
    reference_stays: bool = True  # otherwise it is freed before the first step
    teacher: int = 0
    critic: int = 0  # with everything that its own training holds
    gathered: int = 0  # of a sharded model: other devices' shards, while a pass uses them
    sampler: int = 0  # a copy of the weights to generate with
    quantized: int = 0  # 8-bit copies of the layers' weights to generate with
    sampler_leaves: bool = False  # both exist only while completions are generated
    cache: int = 0  # keys and values of the completions being generated
    staged: int = 0  # of moments in host memory: the part that is on the device during an optimizer step
    engine: int = 0  # of vLLM on the same device, while it generates
    engine_weights: int = 0  # of those, its part of the weights
    engine_sleeps: bool = True  # it gives its memory back while the policy is trained
    optimizer_leaves: bool = False  # master weights and moments are in host memory while completions are generated

    @property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Bytes at the worst moment of each phase: what is held all the time, and what a pass allocates and frees."""
        own, step = self.model, self.step
        sampling = self.sampler + self.quantized
        loaded = own.weights + own.masters + own.average + self.teacher + self.critic + self.cache
        loaded += 0 if self.engine_sleeps else self.engine
        loaded += 0 if self.sampler_leaves else sampling
        always = loaded + own.optimizer + self.reference * self.reference_stays
        parts = {
            "reference beforehand": (loaded + self.reference, self.gathered + step.forward_only),
            "forward and backward": (always + own.gradients, self.gathered + step.peak),
            "optimizer step": (always + own.gradients, self.staged),
            "evaluation": (always, self.gathered + step.forward_only),
        }
        if self.reference_stays:
            del parts["reference beforehand"]
        returning = self.engine * self.engine_sleeps + sampling * self.sampler_leaves
        if returning:
            left = own.masters + own.optimizer if self.optimizer_leaves else 0
            parts["generation"] = (always - left + returning, 0)
        return parts

    @property
    def phases(self) -> dict[str, int]:
        """Bytes at the worst moment of each phase."""
        return {phase: held + passing for phase, (held, passing) in self.parts.items()}

    @property
    def with_overhead(self) -> float:
        """Bytes of the worst phase with the device's context, libraries and the allocator's fragmentation.

        Weights and optimizer states are few large blocks that stay; the tensors of a pass come and go.
        """
        return BASE_BYTES + max(HELD_GAPS * held + PASS_GAPS * passing for held, passing in self.parts.values())

    def fits(self, available: int) -> bool:
        """Return whether a device with this many bytes can hold it, with a margin for what is not counted."""
        has_cache = self.engine_weights <= (1 - ENGINE_MARGIN) * self.engine
        return self.with_overhead <= (1 - MARGIN) * available and has_cache

    @property
    def peak(self) -> int:
        return max(self.phases.values())


T = TypeVar("T")
_kept: dict[Any, Any] | None = None  # what `keep_estimates` keeps


@contextmanager
def keep_estimates() -> Iterator[None]:
    """Make models without weights and count passes once in the block, in which no model directory changes."""
    global _kept
    before = _kept
    _kept = {} if before is None else before
    try:
        yield
    finally:
        _kept = before


def kept(key: Any, make: Callable[[], T]) -> T:
    """Return what `make` returns, inside of `keep_estimates` that of the first call with this key."""
    if _kept is None:
        return make()
    if key not in _kept:
        _kept[key] = make()
    found: T = _kept[key]
    return found


def counted_model(config: ModelConfig, head: Head, dtype: torch.dtype, *, trainable: bool = True) -> Any:
    """Return `empty_model`, to be counted and not changed: inside of `keep_estimates` the same one each time."""
    key = ("model", astuple(config), head, dtype, trainable)
    return kept(key, lambda: empty_model(config, head, dtype, trainable=trainable))


def empty_model(config: ModelConfig, head: Head, dtype: torch.dtype, *, trainable: bool = True) -> Any:
    """Return the model as training would load it, on the meta device: all shapes, no weights."""
    source = paths.base_model_path(paths.resolve_path(config.path))  # training would merge adapters into it
    hf_config = loading.read_config(source, head)
    hf_config.pad_token_id = None  # some models search the tokens for it, which have no values here
    with torch.device("meta"), paths.loading_errors(source):
        model = loading.AUTO_CLASSES[head].from_config(hf_config, dtype=dtype)
    if trainable and config.lora_rank:
        with torch.device("meta"):
            adapters.add_adapters(model, config, head)
        for parameter in loading.trainable_parameters(model).values():
            parameter.data = parameter.data.to(dtype)  # as peft does on a real device
    elif trainable:
        freeze_weights(model, config, head)
    else:
        model.requires_grad_(False)
    attention.use_packed(model)
    if trainable and config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(trainable)


def model_memory(model: Any, *, average: bool, in_4bit: bool = False, optimizer: str = "adamw") -> ModelMemory:
    """Count what one device holds for a model that is not sharded; `requires_grad` marks what is trained."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    embeddings = embedding_names(model)
    states = sum(
        state_bytes(rule_for(optimizer, name, p.shape, embeddings), p.shape)
        for name, p in model.named_parameters()
        if p.requires_grad
    )
    count = sum(p.numel() for p in trained)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    if in_4bit:
        shrunk = [m.weight for m in quantized_layers(model) if not m.weight.requires_grad]
        weights -= round(sum(w.numel() * (w.element_size() - BITS_IN_4BIT / 8) for w in shrunk))
    return ModelMemory(
        parameters=sum(p.numel() for p in parameters),
        trained=count,
        weights=weights,
        masters=4 * sum(p.numel() for p in trained if p.dtype != torch.float32),
        gradients=4 * count,
        optimizer=states,
        average=4 * count * average,
    )


@dataclass(slots=True, frozen=True)
class Sharding:
    """How devices share a model: FSDP over `data` ranks, each of which has `tensor` ranks.

    `context` data ranks each process the same samples and divide their tokens.
    """

    data: int = 1
    tensor: int = 1
    zero: int = 3
    context: int = 1
    experts: int = 1  # above 1: data ranks hold whole experts
    replicate: int = 1  # copies of the model; each is sharded over data / replicate ranks
    deferred: bool = False  # whole gradients are held until the last micro-batch of a step
    pipeline: int = 1  # ranks that hold different layers, each divided as the other sizes say
    virtual: int = 1  # stages of each of them
    layers_per_stage: tuple[int, ...] = ()
    ulysses: int = 0  # context ranks that exchange heads, the others form a ring; 0: as many as the heads allow
    sequence: bool = False  # tensor ranks also divide tokens and vocabulary
    in_host: bool = False  # parameters are in host memory

    @property
    def data_parallel_size(self) -> int:
        """The number of parts that the samples of a step are divided into."""
        return self.data // self.context

    @property
    def token_ranks(self) -> int:
        """The number of ranks that divide what a micro-batch keeps for the backward pass.

        With sequence parallelism tensor ranks divide it inside of attention and MLPs by heads and columns, outside by
        tokens: as much as if they divided the tokens everywhere.
        """
        return self.context * (self.tensor if self.sequence else 1)

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline

    def parameters(self, model: Any) -> list[list[tuple[str, torch.nn.Parameter]]]:
        """Return the model's parameters by name, for each pipeline rank those that it holds."""
        if self.pipeline == 1:
            return [list(model.named_parameters())]
        sizes = self.pipeline, self.virtual, self.layers_per_stage
        return [list(parameters_of_rank(model, rank, *sizes)) for rank in range(self.pipeline)]


def sharded_memory(model: Any, sharding: Sharding, *, average: bool) -> ModelMemory:
    """Count what one device holds of a sharded model; trained parameters are float32, master and weight at once.

    Of pipeline stages, the one that holds the most.
    """
    whole = whole_experts(model, sharding)
    stages = [
        {p: elements_per_device(p, name, sharding, whole=p in whole) for name, p in held}
        for held in sharding.parameters(model)
    ]
    sizes = max(stages, key=lambda sizes: sum(size * (16 if p.requires_grad else 1) for p, size in sizes.items()))
    trained = sum(size for p, size in sizes.items() if p.requires_grad)
    count = sum(p.requires_grad for p in sizes)
    return ModelMemory(
        parameters=sum(p.numel() for p in model.parameters()),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        weights=sum(size * p.element_size() for p, size in sizes.items() if not p.requires_grad),
        masters=4 * trained,
        gradients=4 * trained,
        optimizer=8 * trained + 4 * count,
        average=4 * trained * average,
    )


def gathered_bytes(model: Any, sharding: Sharding) -> int:
    """Count the bytes of other devices' shards that a device holds during a pass, in the compute dtype.

    Parameters outside the layers are gathered all the time, with their gradients; of the layers, the one in use and
    the next (zero 3), or all of them (zero 2); in addition the gradients of one layer. Whole experts are not gathered;
    of those that are trained there is a copy in the type that the model computes in, of those in host memory one of the
    layer in use.
    """
    return max(gathered_by_rank(model, sharding, held) for held in sharding.parameters(model))


def gathered_by_rank(model: Any, sharding: Sharding, held: list[tuple[str, torch.nn.Parameter]]) -> int:
    """Count the same of one pipeline rank, which holds the given parameters."""
    whole = Sharding(1, sharding.tensor, sequence=sharding.sequence)
    staying = whole_experts(model, sharding)
    by_layer: Counter[str] = Counter()
    for name, p in held:
        if p in staying and (p.requires_grad or sharding.in_host):
            by_layer[layer_of(name)] += elements_per_device(p, name, sharding, whole=True) * p.element_size()
    copies = max(by_layer.values(), default=0) if sharding.in_host else by_layer.total()
    weights: Counter[str] = Counter()
    gradients: Counter[str] = Counter()  # in the compute type, and in float32 as they are accumulated
    for name, p in held:
        if p in staying:
            continue
        size, layer = elements_per_device(p, name, whole), layer_of(name)
        weights[layer] += size * p.element_size()
        gradients[layer] += size * (p.element_size() + 4) * p.requires_grad
    outside = weights.pop("", 0) + gradients.pop("", 0)
    layers = weights.total() if sharding.zero == 2 else 2 * max(weights.values(), default=0)
    waiting = gradients.total() if sharding.deferred else max(gradients.values(), default=0)
    return outside + layers + waiting + copies


def whole_experts(model: Any, sharding: Sharding) -> set[torch.nn.Parameter]:
    """Return the parameters of experts that stay whole on a device: all, with expert parallelism."""
    return {p for _, module in experts_of(model) for p in module.parameters()} if sharding.experts > 1 else set()


def elements_per_device(parameter: torch.nn.Parameter, name: str, sharding: Sharding, *, whole: bool = False) -> int:
    """Count the elements of a parameter on one device: tensor ranks divide the layers' matrices, data ranks all.

    Of experts that stay whole, a device has those of an expert-parallel rank. With sequence parallelism tensor ranks
    also divide the matrices outside of the layers, by the vocabulary.
    """
    divided = (layer_of(name) or sharding.sequence) and parameter.ndim > 1
    tensor = sharding.tensor if divided else 1
    if whole:
        return -(-parameter.numel() // (sharding.experts * tensor))
    return -(-parameter.numel() // (tensor * sharding.data // sharding.replicate))


def eight_bit_bytes(model: Any) -> int:
    """Count the copies with which the local engine generates in fp8: a byte per weight, a float32 scale per row.

    Experts, embeddings and the head keep their weights (engines/decoder.py::Decoder.quantize).
    """
    layers = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and layer_of(name) and ".lora_" not in name
    ]
    return sum(weight.numel() + 4 * len(weight) for weight in layers if all(size % 16 == 0 for size in weight.shape))


def quantized_layers(model: Any) -> list[torch.nn.Linear]:
    """Return the linear layers that QLoRA quantizes: all but the heads."""
    heads = {model.get_output_embeddings(), *(m for name, m in model.named_modules() if name == "score")}
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in heads]


def pass_memory(
    model: Any,
    samples: Sequence[Sample],
    request: ForwardRequest,
    teacher: Any = None,
    *,
    kernels: bool = False,
    sharded: bool = False,
    offload: bool = False,
) -> PassMemory:
    """Count what one pass over a micro-batch of these samples allocates. Model and teacher are on the meta device.

    `kernels`: with an accelerator's fused kernels, where nn/layers.py supports the model; `sharded`: over processes;
    `offload`: the inputs of checkpointed layers are kept in host memory.
    """
    if any(p.ndim == 3 and p.dtype == torch.float32 for p in model.parameters()):
        # The meta device has no grouped matrix product in float32: count in two bytes per number, then double.
        how = {"kernels": kernels, "sharded": sharded, "offload": offload}
        half = pass_memory(model.to(torch.bfloat16), samples, request, teacher, **how)
        model.to(torch.float32)
        return PassMemory(**{name: 2 * size for name, size in asdict(half).items()})
    batch = on_meta(collate(samples))
    runner, teacher_runner = (None if m is None else runner_on_meta(m, kernels, sharded) for m in (model, teacher))
    assert runner is not None
    offloaded = CountedOffload()
    if offload:
        offloaded.install(model)
    # From the second micro-batch of a step on, gradients exist already and are added to.
    gradients, hooks = [], []
    for parameter in (p for p in model.parameters() if p.requires_grad):
        master = parameter
        if parameter.dtype != torch.float32:
            master = torch.empty_like(parameter, dtype=torch.float32)
            hooks.append(parameter.register_post_accumulate_grad_hook(accumulate_into(master)))
            setattr(parameter, MASTER, master)
        master.grad = torch.empty_like(master)
        gradients.append(master.grad)
    meter = AllocationMeter([*model.parameters(), *model.buffers(), *gradients])
    with meter:
        with torch.no_grad():
            forward(runner, batch, request, teacher_runner)
        forward_only, meter.peak = meter.peak, meter.now
        out = forward(runner, batch, request, teacher_runner)
        total = torch.stack([value.sum() for value in tensor_fields(out).values() if value.requires_grad]).sum()
        activations = meter.now
        total.backward()
    for hook in hooks:
        hook.remove()
    for parameter in model.parameters():
        vars(parameter).pop(MASTER, None)
    model.zero_grad()
    return PassMemory(activations=activations, peak=meter.peak, forward_only=forward_only, host=offloaded.host_bytes)


def max_pass_bytes(config: ModelConfig, head: Head, dtype: torch.dtype, tokens: int) -> int:
    """Return the peak bytes of a pass over `tokens` tokens on a GPU; 0 if unknown: some models need real values."""
    sample = Sample(tokens=np.zeros(tokens, dtype=np.int32), mask=np.arange(tokens) > 0)
    request = ForwardRequest(names=frozenset({"logprobs" if head == "token" else "values"}))
    with suppress(RuntimeError, NotImplementedError), torch.inference_mode(False), torch.enable_grad():
        return pass_memory(empty_model(config, head, dtype), [sample], request, kernels=True).peak
    return 0


def runner_on_meta(model: Any, kernels: bool, sharded: bool) -> ModelRunner:
    """Return a runner for a model on the meta device, with fused layers if `kernels`."""
    if not kernels:
        return ModelRunner(model, varlen_kernel=False)
    use_fused_layers(model, meta, join_weights=not sharded)
    return ModelRunner(model, varlen_kernel=False, fused_head=FusedHead.from_model(model, meta))


def tensor_fields(values: Any) -> dict[str, torch.Tensor]:
    """Return the fields of a dataclass that are tensors."""
    pairs = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: value for name, value in pairs.items() if isinstance(value, torch.Tensor)}


def on_meta(batch: MicroBatch) -> MicroBatch:
    for name, value in tensor_fields(batch).items():
        setattr(batch, name, value.to("meta"))
    return batch


class AllocationMeter(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, until their storage is freed."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self.add, result)
        self.peak = max(self.peak, self.now)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_meta and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self.remove, storage._cdata, storage.nbytes())

    def remove(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size
