"""One model held by many processes: FSDP2 over them, tensor and context parallelism inside.

Rank = (data rank * context_parallel + context rank) * tensor_parallel + tensor rank. Data ranks see different samples.
The ranks of one see the same: context ranks divide the tokens (parallel/context.py), tensor ranks the heads. FSDP
divides the parameters among data and context ranks.
Everything that needs whole parameters runs inside the forward of one small module, `Whole`, which is FSDP's root: so
embeddings, heads and what is computed from them in chunks are gathered once a pass. Gradients are summed, not averaged,
because the loss is already divided by the global count.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from posttrain.checkpoints.tensor_files import Entry
from posttrain.core.errors import UsageError
from posttrain.core.types import Outputs
from posttrain.parallel.context import Context
from posttrain.parallel.expert import keep_own

T = TypeVar("T")

FAMILIES = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
"""Families whose Hugging Face plan of tensor parallelism was compared with one process."""

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""The plan's words: cut the outputs; cut the inputs; whole, but used on local heads, so that its gradient is a part."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the processes of a pool share one model."""

    tensor_parallel: int = 1
    zero: int = 3
    """3: parameters are gathered for each layer and let go again; 2: they stay gathered until the backward pass."""
    offload: frozenset[str] = frozenset()
    """`parameters`: they, gradients and Adam's state live in host memory; a layer comes to the device when used."""
    always: bool = False
    """Shard even where there is one process only."""
    context_parallel: int = 1
    expert_parallel: int = 1
    """1, or as many as FSDP has ranks: each keeps some experts (parallel/expert.py) instead of a part of each."""

    def __post_init__(self) -> None:
        if self.zero not in (2, 3):
            raise UsageError(f"cluster.layout: zero is {self.zero}; it must be 2 or 3")
        if self.tensor_parallel < 1:
            raise UsageError(f"cluster.layout: tp is {self.tensor_parallel}; it must be at least 1")
        if self.context_parallel < 1:
            raise UsageError(f"cluster.layout: cp is {self.context_parallel}; it must be at least 1")
        if self.expert_parallel > 1 and "parameters" in self.offload:
            raise UsageError("cluster.offload has parameters, but with ep experts stay on the device. Leave out one.")

    @property
    def alike(self) -> int:
        """Ranks that see the same samples."""
        return self.context_parallel * self.tensor_parallel

    def applies(self) -> bool:
        """Whether there are processes to share with, or what they do is wanted of one."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return several or self.always or "parameters" in self.offload


class Whole(torch.nn.Module):
    """Inside its forward pass the parameters of the modules it holds are whole."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.held = torch.nn.ModuleList(modules)

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


@cache
def mesh_of(world: Any, device_type: str, tensor_parallel: int) -> DeviceMesh:
    """Models of one pool share the groups; `world` is the default group they were made from."""
    shape = (dist.get_world_size(world) // tensor_parallel, tensor_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=("data", "tensor"))


@cache
def context_of(world: Any, device_type: str, layout: Layout) -> Context | None:
    """Whom this rank divides packs with."""
    if layout.context_parallel == 1:
        return None
    shape = (dist.get_world_size(world) // layout.alike, layout.context_parallel, layout.tensor_parallel)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("sample", "context", "tensor"))
    return Context.of(mesh.get_group("context"))


def leave() -> None:
    """At the end of the process, if nobody did before."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(slots=True, eq=False)
class Shards:
    """This process's part of a model, and what it has to say to the others."""

    layout: Layout
    device: torch.device
    dtype: torch.dtype  # that the model computes in
    mesh: DeviceMesh
    context: Context | None = None
    root: Any = None  # Whole, as FSDP's root
    partial: frozenset[str] = frozenset()  # parameters whose gradient is a part of a sum over tensor ranks
    experts: list[Any] = field(default_factory=list)  # modules whose experts are whole and stay where they are
    unread: list[Callable[[], None]] = field(default_factory=list)  # fill parameters that have no weights yet

    @classmethod
    def among(cls, layout: Layout, device: torch.device, dtype: torch.dtype) -> Shards:
        """Over all processes of the default group."""
        if not dist.is_initialized():  # a group of one
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(leave)
        world, tensor, context = dist.get_world_size(), layout.tensor_parallel, layout.context_parallel
        if world % layout.alike:
            named = f"tp={tensor}" + f" and cp={context} together do" * (context > 1) + " does" * (context == 1)
            raise UsageError(f"cluster.layout: {named} not divide the {world} processes of this role")
        if layout.expert_parallel not in (1, world // tensor):
            raise UsageError(
                f"cluster.layout: ep is {layout.expert_parallel}; it must be {world // tensor}, the devices that "
                "divide the rest of the model by FSDP, or be left out"
            )
        mesh = mesh_of(dist.group.WORLD, device.type, tensor)
        return cls(layout, device, dtype, mesh, context_of(dist.group.WORLD, device.type, layout))

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("tensor")

    # Cutting

    def cut(self, model: Any, others: Sequence[torch.nn.Module | None] = ()) -> None:
        """Keep this process's part of a model and of frozen or small modules that its forward pass also uses."""
        modules = [model, *(module for module in others if module is not None)]
        for module in modules:
            for owner in module.modules():
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else buffer.to(self.device)
            if self.layout.tensor_parallel > 1 and hasattr(module, "config"):
                self.partial |= split_heads(module, self.mesh["tensor"], self.device)
        if self.layout.expert_parallel > 1:
            self.experts = keep_own(model, self.mesh["data"], self.device, self.dtype)
        self.root = Whole(modules)
        for module in modules:
            for layer in decoder_layers(module):
                self.shard(layer)
        self.shard(self.root)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
        if self.unread:
            here = torch.device("cpu") if "parameters" in self.layout.offload else self.device
            self.root._apply(lambda tensor: torch.empty_like(tensor, device=here) if tensor.is_meta else tensor)
            for read in self.unread:
                read()
            self.unread.clear()

    def shard(self, module: torch.nn.Module) -> None:
        staying = {parameter for experts in self.experts for parameter in experts.parameters()}
        for parameter in module.parameters():
            if not (parameter.is_meta or isinstance(parameter, DTensor)):
                parameter.data = parameter.data.to(self.device)
        half = self.dtype != torch.float32
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # batches hold float32 numbers on purpose
        if half:
            policy = MixedPrecisionPolicy(self.dtype, torch.float32, cast_forward_inputs=False)
        offload = OffloadPolicy()
        if "parameters" in self.layout.offload:
            offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        # The root keeps its parameters from the forward to the backward pass: the loss is the last thing inside.
        after = self.layout.zero == 3 and module is not self.root
        how: dict[str, Any] = {"reshard_after_forward": after, "mp_policy": policy, "offload_policy": offload}
        fully_shard(module, mesh=self.mesh["data"], ignored_params=staying, **how)

    # Computing

    def inside(self, function: Callable[..., T], *args: Any) -> T:
        """Call it with whole parameters."""
        return self.root(function, *args)

    def let_go(self) -> None:
        """After passes without a backward pass: only the parts stay."""
        if hasattr(self.root, "reset_iter_state"):  # newer torch: the order of passes is forgotten too
            self.root.reset_iter_state()
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def paced(self, work: Sequence[T]) -> Iterator[T | None]:
        """The work, and then None as long as others have more: all must make the same number of passes."""
        most = torch.tensor(len(work), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        yield from work
        for _ in range(int(most) - len(work)):
            yield None

    # Gradients

    @torch.no_grad()
    def complete(self, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
        """Make the gradients of what all tensor ranks hold the same on each, in place."""
        for name, parameter in self.idle_experts(gradients, parameters).items():
            gradients[name] = torch.zeros_like(local(parameter))
        size = self.layout.tensor_parallel
        if size == 1:
            return
        for name, gradient in gradients.items():
            if not is_split(parameters[name]):
                total = gradient.to(self.device)  # it may live in host memory
                dist.all_reduce(total, group=self.tensor_group)
                gradient.copy_(total if name in self.partial else total / size)  # else whole on each, but for rounding

    def idle_experts(
        self, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Trained experts here that no token came to: their gradient is 0, not none."""
        ids = {id(parameter) for experts in self.experts for parameter in experts.parameters()}
        return {name: p for name, p in parameters.items() if id(p) in ids and name not in gradients}

    @torch.no_grad()
    def norm(self, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of all ranks' parts together; what several hold counts once."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double().to(self.device)
            split = torch.tensor([is_split(parameters[name]) for name in gradients], device=self.device)
            total = (norms.square() * torch.where(split, 1.0, 1 / self.layout.tensor_parallel)).sum()
        dist.all_reduce(total)
        return total.sqrt()

    # Files

    def entry(self, name: str, part: torch.Tensor, like: torch.Tensor) -> Entry:
        """One tensor that all hold a part of, for the checkpoint."""
        shape = tuple(like.shape) if part.ndim == like.ndim else tuple(part.shape)
        return Entry({name: (shape, part.dtype)}, lambda: {name: gathered(part, like)})


def touch(total: torch.Tensor, out: Outputs) -> torch.Tensor:
    """The same number, in whose backward pass everything computed takes part, with nothing to add.

    A pass whose loss leaves an output unused would give some parameters no gradient, and FSDP would wait for it.
    """
    outputs = [getattr(out, name) for name in Outputs.__slots__]
    return Touch.apply(total, *(x for x in outputs if x is not None and x.requires_grad))  # type: ignore[no-any-return]


class Touch(torch.autograd.Function):
    """Its first argument; the others get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in outputs]
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], *(torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.likes)


# Tensor parallelism


def split_heads(model: Any, mesh: DeviceMesh, device: torch.device) -> frozenset[str]:
    """Give each tensor rank its heads and its part of the feed-forward layers; the names whose gradients are parts."""
    config, size = model.config, mesh.size()
    if config.model_type not in FAMILIES:
        raise UsageError(
            f"cluster.layout: tp={size}: {type(model).__name__} ({config.model_type}) cannot be split over tensor "
            f"ranks here; {', '.join(FAMILIES)} can. Leave tp at 1: zero=3 shards every model."
        )
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, what) % size:
            raise UsageError(
                f"cluster.layout: tp={size} does not divide the model's {what.replace('_', ' ')}, "
                f"which is {getattr(config, what)}"
            )
    prefix, plan = model.base_model_prefix, config.base_model_tp_plan
    layers = getattr(model, prefix)
    for parameter in layers.parameters():
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    styles: dict[str, Any] = {}
    for pattern, word in plan.items():
        if word in (COLUMNS, ROWS):
            styles |= styles_of(layers, pattern, word)
    parallelize_module(layers, mesh, styles, src_data_rank=None)
    summed = [pattern.split("*.")[-1] for pattern, word in plan.items() if word == SUMMED]
    names = (name for name, _ in model.named_parameters())
    return frozenset(name for name in names if any(f".{part}." in name for part in summed))


def styles_of(layers: Any, pattern: str, word: str) -> dict[str, Any]:
    """Beside an adapter: its second matrix is cut like the layer's outputs, its first like the layer's inputs."""
    style = ColwiseParallel if word == COLUMNS else RowwiseParallel
    first, *_ = (module for name, module in layers.named_modules() if name == pattern.replace("*", "0"))
    if not hasattr(first, "base_layer"):
        return {pattern: style()}
    return {f"{pattern}.base_layer": style(), f"{pattern}.lora_{'B' if word == COLUMNS else 'A'}.default": style()}


def split_dim(parameter: torch.Tensor) -> int | None:
    """The dimension of which tensor ranks hold different parts; None: each holds all that its data rank has."""
    if not isinstance(parameter, DTensor):
        return None
    names = parameter.device_mesh.mesh_dim_names or ()
    placement = parameter.placements[names.index("tensor")] if "tensor" in names else Replicate()
    return None if isinstance(placement, Replicate) else placement.dim  # type: ignore[attr-defined]


def is_split(parameter: torch.Tensor) -> bool:
    return split_dim(parameter) is not None


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """What is gathered together: the blocks that the family says belong together."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]


# Copies to generate with


def skeleton_of(model: Any) -> Any:
    """The same modules without weights, to make whole copies of later."""
    empty = {id(p): torch.nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def filled(skeleton: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model like the skeleton with room for weights, which keep their addresses."""
    room = {
        id(p): torch.nn.Parameter(torch.empty_like(p, device=device, dtype=dtype), requires_grad=False)
        for p in skeleton.parameters()
    }
    return copy.deepcopy(skeleton, room).to(device).eval()


# Parts and wholes


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part, in the same memory."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def gathered(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole of which this is a part, cut as `like` is; all ranks call together."""
    if not isinstance(like, DTensor) or part.ndim != like.ndim:  # as Adam's step count, the same everywhere
        return part
    mesh, whole = like.device_mesh, part.to(torch.device(like.device_mesh.device_type))
    names = mesh.mesh_dim_names or ()
    for name in ("data", "tensor"):  # what was cut last is put together first
        placement = like.placements[names.index(name)] if name in names else Replicate()
        if isinstance(placement, Replicate):
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        shape = list(whole.shape)
        shape[dim] = like.shape[dim]
        if name == "data" and dim == split_dim(like):
            shape[dim] //= mesh.size(names.index("tensor"))
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(
            whole, mesh[name], [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
        )
        whole = cut.full_tensor()
    return whole


def part_of(parameter: torch.Tensor) -> tuple[slice, ...]:
    """Which part of the whole this process holds: first the tensor rank's, of that the data rank's."""
    edges = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or ()
        for name in ("tensor", "data"):
            if name in names:
                placement = parameter.placements[names.index(name)]
                if not isinstance(placement, Replicate):
                    dim: int = placement.dim  # type: ignore[attr-defined]
                    edges[dim] = chunk(edges[dim], mesh.size(names.index(name)), mesh.get_local_rank(name))
    return tuple(slice(first, end) for first, end in edges)


def chunk(edge: tuple[int, int], count: int, index: int) -> tuple[int, int]:
    """As torch.chunk cuts: all parts but the last have the same size, and some may be empty."""
    first, end = edge
    size = -(-(end - first) // count)
    return min(first + size * index, end), min(first + size * (index + 1), end)


__all__ = ["Layout", "Shards", "filled", "gathered", "local", "part_of", "skeleton_of", "touch"]
