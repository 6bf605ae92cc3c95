"""How much memory a training step takes, without loading a weight.

Of P parameters A are trained (all of them without adapters); a weight has e bytes (2 in bfloat16, 4 in float32):

    weights      e P                           with model.load_in_4bit 4.13 bits a number in the linear layers
    masters      4 A                           if what is trained is not float32 itself
    gradients    4 A                           from the first backward pass of a step to the optimizer's
    AdamW        8 A + 4 per trained tensor    two averages, and a step counter
    EMA          4 A                           with update.ema_decay
    helpers      e P                           of a reference or a teacher

These are exact. What a forward and backward pass takes besides depends on the architecture, so no formula is tried:
the model's own code is run on tensors without storage (torch's meta device), and what it would allocate is counted.
Hidden from the count are the inside of fused kernels and what the allocator cannot use for its size.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from posttrain.config.sections import ModelConfig
from posttrain.core.types import Batch, ForwardRequest, Head, Sample
from posttrain.data.packing import collate
from posttrain.models import adapters, loading
from posttrain.nn import attention
from posttrain.nn.forward import ModelRunner, forward
from posttrain.nn.kernels import meta
from posttrain.nn.layers import MASTER, PlainHead, use_fused_layers
from posttrain.nn.optimizer import accumulate_into
from posttrain.parallel.expert import experts_of

# A number, its share of the scale of its block of 64, and of the scale of 256 such scales.
BITS_IN_4BIT = 4 + 8 / 64 + 32 / (64 * 256)


@dataclass(slots=True, frozen=True, kw_only=True)
class Standing:
    """Bytes that training holds for a model, whatever the batch."""

    parameters: int  # a count, not bytes
    trained: int  # likewise
    weights: int
    masters: int
    gradients: int
    optimizer: int
    average: int


@dataclass(slots=True, frozen=True, kw_only=True)
class Passing:
    """Bytes that one forward and backward pass over a pack adds; all 0: not known."""

    kept: int = 0  # activations, from the forward to the backward pass
    peak: int = 0  # the most at one time: activations, a chunk of logits, gradients on their way
    forward_only: int = 0  # the most at one time when nothing is kept: evaluation, or a reference's pass


@dataclass(slots=True, frozen=True, kw_only=True)
class Needs:
    """Bytes of everything on the training device, and what of it is there at the same time."""

    standing: Standing
    passing: Passing
    reference: int = 0
    reference_stays: bool = True  # else: it is freed before the first step
    teacher: int = 0
    critic: int = 0  # with all that its own training holds
    gathered: int = 0  # where the model is divided: other devices' parts, while a pass uses them
    sampler: int = 0  # a copy to generate with
    cache: int = 0  # keys and values of answers under way

    @property
    def phases(self) -> dict[str, int]:
        """Bytes at the worst moment of each phase."""
        own, step = self.standing, self.passing
        loaded = own.weights + own.masters + own.average + self.teacher + self.critic + self.sampler + self.cache
        always = loaded + own.optimizer + self.reference * self.reference_stays
        phases = {
            "reference beforehand": loaded + self.reference + self.gathered + step.forward_only,
            "forward and backward": always + own.gradients + self.gathered + step.peak,
            "optimizer step": always + own.gradients,
            "evaluation": always + self.gathered + step.forward_only,
        }
        if self.reference_stays:
            del phases["reference beforehand"]
        return phases

    @property
    def peak(self) -> int:
        return max(self.phases.values())


def empty_model(config: ModelConfig, head: Head, dtype: torch.dtype, *, trainable: bool = True) -> Any:
    """The model as training would load it, on the meta device: all shapes, no weights."""
    source = loading.resolve_path(config.path)
    while loading.is_adapter(source):  # it would be merged into its base
        source = loading.resolve_path(adapters.base_of(Path(source)))
    hf_config = loading.read_config(source, head)
    hf_config.pad_token_id = None  # else some models look for it among the tokens, which have no values here
    with torch.device("meta"), loading.explained(source):
        model = loading.AUTO_CLASSES[head].from_config(hf_config, dtype=dtype)
    if trainable and config.lora_rank:
        with torch.device("meta"):
            adapters.add_adapters(model, config, head)
        for parameter in loading.trainable_parameters(model).values():
            parameter.data = parameter.data.to(dtype)  # as peft does on a real device
    else:
        model.requires_grad_(trainable)
    model.set_attn_implementation(attention.NAME)
    if trainable and config.checkpoint_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(trainable)


def standing(model: Any, *, average: bool, in_4bit: bool = False) -> Standing:
    """What is held for a model; its parameters' `requires_grad` says which are trained."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    count = sum(p.numel() for p in trained)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    if in_4bit:
        shrunk = [m.weight for m in linear_layers(model) if not m.weight.requires_grad]
        weights -= round(sum(w.numel() * (w.element_size() - BITS_IN_4BIT / 8) for w in shrunk))
    return Standing(
        parameters=sum(p.numel() for p in parameters),
        trained=count,
        weights=weights,
        masters=4 * sum(p.numel() for p in trained if p.dtype != torch.float32),
        gradients=4 * count,
        optimizer=8 * count + 4 * len(trained),
        average=4 * count * average,
    )


@dataclass(slots=True, frozen=True)
class Division:
    """How the devices of a place divide a model: FSDP over `data` ranks, each of `tensor` ranks.

    Of the data ranks `context` each see the same samples and divide their tokens.
    """

    data: int = 1
    tensor: int = 1
    zero: int = 3
    context: int = 1
    experts: int = 1  # more: data ranks keep whole experts

    @property
    def shares(self) -> int:
        """Parts that the samples of a step are cut into."""
        return self.data // self.context

    @property
    def devices(self) -> int:
        return self.data * self.tensor


def share(model: Any, division: Division, *, average: bool) -> Standing:
    """What one device holds of a model that is divided: what is trained in float32, which is master and weight."""
    sizes = {p: part_of(p, name, division) for name, p in layered(model).items()}
    trained = sum(size for p, size in sizes.items() if p.requires_grad)
    count = sum(p.requires_grad for p in sizes)
    return Standing(
        parameters=sum(p.numel() for p in sizes),
        trained=sum(p.numel() for p in sizes if p.requires_grad),
        weights=sum(size * p.element_size() for p, size in sizes.items() if not p.requires_grad),
        masters=4 * trained,
        gradients=4 * trained,
        optimizer=8 * trained + 4 * count,
        average=4 * trained * average,
    )


def gathered(model: Any, division: Division) -> int:
    """Bytes of others' parts that a device holds during a pass, in the type that is computed in.

    All that is in no layer is there all the time, with its gradients; of the layers (zero 3) the one in use and the
    next, or (zero 2) all of them; and one layer's gradients on their way. Experts that stay where they are are not
    gathered; of those that are trained there is a copy in the type that is computed in.
    """
    whole = Division(1, division.tensor)
    staying = {p for _, module in experts_of(model) for p in module.parameters()} if division.experts > 1 else set()
    copies = sum(part_of(p, "", division) * p.element_size() for p in staying if p.requires_grad)
    weights: Counter[str] = Counter()
    gradients: Counter[str] = Counter()  # as they are computed, and in float32 as they are added up
    for name, p in layered(model).items():
        if p in staying:
            continue
        size, layer = part_of(p, name, whole), layer_of(name)
        weights[layer] += size * p.element_size()
        gradients[layer] += size * (p.element_size() + 4) * p.requires_grad
    outside = weights.pop("", 0) + gradients.pop("", 0)
    there = weights.total() if division.zero == 2 else 2 * max(weights.values(), default=0)
    return outside + there + max(gradients.values(), default=0) + copies


def layered(model: Any) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters())


def layer_of(name: str) -> str:
    """The decoder layer that a parameter belongs to: `model.layers.3` of model.layers.3.mlp.up_proj.weight."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def part_of(parameter: torch.nn.Parameter, name: str, division: Division) -> int:
    """Numbers of a parameter that one device holds: tensor ranks divide the matrices of layers, data ranks all."""
    tensor = division.tensor if layer_of(name) and parameter.ndim > 1 else 1
    return -(-parameter.numel() // (tensor * division.data))


def linear_layers(model: Any) -> list[torch.nn.Linear]:
    """Those that QLoRA shrinks: all but the heads."""
    heads = {model.get_output_embeddings(), *(m for name, m in model.named_modules() if name == "score")}
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m not in heads]


def passing(
    model: Any,
    samples: Sequence[Sample],
    request: ForwardRequest,
    teacher: Any = None,
    *,
    kernels: bool = False,
    divided: bool = False,
) -> Passing:
    """What one pass over a pack of these samples allocates. The model (and the teacher) are on the meta device.

    `kernels`: with those of an accelerator, for the layers that nn/layers.py knows; `divided`: among processes.
    """
    if any(p.ndim == 3 and p.dtype == torch.float32 for p in model.parameters()):
        # Of experts' products in float32 the meta device knows nothing: count in two bytes a number, then double.
        half = passing(model.to(torch.bfloat16), samples, request, teacher, kernels=kernels, divided=divided)
        model.to(torch.float32)
        return Passing(kept=2 * half.kept, peak=2 * half.peak, forward_only=2 * half.forward_only)
    batch = on_meta(collate(samples))
    runner, teacher_runner = (None if m is None else runner_on_meta(m, kernels, divided) for m in (model, teacher))
    assert runner is not None
    # From the second pack of a step on, gradients are there already and are added to.
    gradients, hooks = [], []
    for parameter in (p for p in model.parameters() if p.requires_grad):
        master = parameter
        if parameter.dtype != torch.float32:
            master = torch.empty_like(parameter, dtype=torch.float32)
            hooks.append(parameter.register_post_accumulate_grad_hook(accumulate_into(master)))
            setattr(parameter, MASTER, master)
        master.grad = torch.empty_like(master)
        gradients.append(master.grad)
    meter = Meter([*model.parameters(), *model.buffers(), *gradients])
    with meter:
        with torch.no_grad():
            forward(runner, batch, request, teacher_runner)
        forward_only, meter.peak = meter.peak, meter.now
        out = forward(runner, batch, request, teacher_runner)
        total = torch.stack([value.sum() for value in vars_of(out).values() if value.requires_grad]).sum()
        kept = meter.now
        total.backward()
    for hook in hooks:
        hook.remove()
    for parameter in model.parameters():
        vars(parameter).pop(MASTER, None)
    model.zero_grad()
    return Passing(kept=kept, peak=meter.peak, forward_only=forward_only)


def full_pack(config: ModelConfig, head: Head, dtype: torch.dtype, tokens: int) -> int:
    """The most that a pass over so many tokens takes on an accelerator; 0: not known, as the model asks for values."""
    sample = Sample(tokens=np.zeros(tokens, dtype=np.int32), mask=np.arange(tokens) > 0)
    request = ForwardRequest(names=frozenset({"logprobs" if head == "token" else "values"}))
    with suppress(RuntimeError, NotImplementedError), torch.inference_mode(False), torch.enable_grad():
        return passing(empty_model(config, head, dtype), [sample], request, kernels=True).peak
    return 0


def runner_on_meta(model: Any, kernels: bool, divided: bool) -> ModelRunner:
    if not kernels:
        return ModelRunner(model, varlen_kernel=False)
    use_fused_layers(model, meta, together=not divided)
    return ModelRunner(model, varlen_kernel=False, plain_head=PlainHead.from_model(model, meta))


def vars_of(values: Any) -> dict[str, torch.Tensor]:
    """The tensors among the fields of a dataclass."""
    pairs = {field.name: getattr(values, field.name) for field in fields(values)}
    return {name: value for name, value in pairs.items() if isinstance(value, torch.Tensor)}


def on_meta(batch: Batch) -> Batch:
    for name, value in vars_of(batch).items():
        setattr(batch, name, value.to("meta"))
    return batch


class Meter(TorchDispatchMode):
    """Counts the bytes of all tensors that operations return, as long as somebody holds them."""

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
