"""One model sharded over many processes: FSDP2 over data ranks, tensor and context parallelism inside.

Rank = ((pipeline rank * data ranks + data rank) * context_parallel + context rank) * tensor_parallel + tensor rank.
Pipeline ranks hold different layers (parallel/pipeline.py); what follows holds for each. Data ranks process different
samples. The ranks of one data rank process the same samples: context ranks divide the tokens (parallel/context.py),
tensor ranks the heads (parallel/tensor.py). FSDP divides the parameters among data and context ranks; with copies of
the model (HSDP) among those of one copy, which are neighbours, and gradients are also summed over the copies.
Everything that needs full parameters runs inside the forward pass of one small module, `FullParameters`, which is
FSDP's root: so embeddings, heads and what is computed from them in chunks are gathered once per pass. Gradients are
summed, not averaged, because the loss is already divided by the global count.
"""

from __future__ import annotations

import atexit
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from posttrain.checkpoints.tensor_files import LazyTensors
from posttrain.core.types import Outputs
from posttrain.parallel.context import ContextGroup, HeadExchange, choose_ulysses_degree
from posttrain.parallel.expert import ExpertExchange, shard_experts
from posttrain.parallel.layouts import ParallelLayout, check_layout
from posttrain.parallel.pipeline import Pipeline
from posttrain.parallel.ring import Ring
from posttrain.parallel.shards import full_tensor, is_tensor_sharded, local_shard
from posttrain.parallel.tensor import apply_tensor_parallel, runs_in_blocks
from posttrain.parallel.tensor_group import TensorGroup

T = TypeVar("T")


class FullParameters(torch.nn.Module):
    """FSDP's root module: inside its forward pass the parameters of the modules it holds are gathered."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.held = torch.nn.ModuleList(modules)

    def forward(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


@cache
def make_mesh(world: Any, device_type: str, tensor_parallel: int, replicate: int, pipeline: int = 1) -> DeviceMesh:
    """Return the device mesh of data and tensor ranks, which models of one pool share; `world`: the default group.

    With several copies of the model, `data` are the ranks of one copy, and `replicate` those with the same shard.
    """
    ranks = dist.get_world_size(world) // tensor_parallel // pipeline
    sizes = {"pipeline": pipeline, "replicate": replicate, "data": ranks // replicate, "tensor": tensor_parallel}
    used = {name: size for name, size in sizes.items() if size > 1 or name in ("data", "tensor")}
    return init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))


def make_pipeline(mesh: DeviceMesh, layout: ParallelLayout, device: torch.device) -> Pipeline | None:
    """Return the ranks that hold the other stages for the samples of this one; None without stages."""
    if layout.pipeline_parallel == 1:
        return None
    group = mesh.get_group("pipeline")
    dist.all_reduce(torch.zeros((), device=device), group=group)  # NCCL connects all ranks in a group's first call
    sizes = layout.pipeline_parallel, layout.virtual_stages, layout.layers_per_stage
    return Pipeline(group, dist.get_rank(group), *sizes, device)


@cache
def make_context_group(world: Any, device: torch.device, context: int, tensor: int, ulysses: int) -> ContextGroup:
    """Return the ranks with which this one divides the tokens of a micro-batch; `ulysses` of them exchange heads."""
    samples = dist.get_world_size(world) // context // tensor
    names: tuple[str, ...] = ("sample", "context", "tensor")
    group = init_device_mesh(device.type, (samples, context, tensor), mesh_dim_names=names).get_group("context")
    if ulysses == context:
        return ContextGroup.from_group(group)
    shape, names = (samples, context // ulysses, ulysses, tensor), ("sample", "ring", "heads", "tensor")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    heads = HeadExchange.from_group(mesh.get_group("heads"))
    return ContextGroup.from_group(group, heads, Ring.from_group(mesh.get_group("ring"), device))


def destroy_process_group() -> None:
    """Destroy the default process group at the end of the process, if it still exists."""
    if dist.is_initialized():
        dist.destroy_process_group()


@dataclass(slots=True, eq=False)
class ModelShards:
    """This process's shard of a model, and the communication with the processes that hold the others."""

    layout: ParallelLayout
    device: torch.device
    dtype: torch.dtype  # that the model computes in
    mesh: DeviceMesh
    pipeline: Pipeline | None = None
    tensor: TensorGroup | None = None
    context: ContextGroup | None = None  # set by `shard`
    root: Any = None  # FullParameters, as FSDP's root
    summed: frozenset[str] = frozenset()  # replicated parameters whose gradients are summed over tensor ranks
    experts: list[Any] = field(default_factory=list)  # modules that hold whole experts, which FSDP leaves alone
    exchange: ExpertExchange | None = None  # of the tokens of these experts
    unread: list[Callable[[], None]] = field(default_factory=list)  # read the weights of parameters on the meta device

    @classmethod
    def create(cls, layout: ParallelLayout, device: torch.device, dtype: torch.dtype) -> ModelShards:
        """Shard over all processes of the default group; without one, over a group of this process alone."""
        if not dist.is_initialized():
            backend = dist.get_default_backend_for_device(device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(destroy_process_group)
        layout.check_devices(dist.get_world_size())
        sizes = layout.tensor_parallel, layout.replicate, layout.pipeline_parallel
        mesh = make_mesh(dist.group.WORLD, device.type, *sizes)
        pipeline = make_pipeline(mesh, layout, device)
        tensor = None
        if layout.tensor_parallel > 1:
            tensor = TensorGroup.from_group(mesh.get_group("tensor"), sequence=layout.sequence_parallel)
        return cls(layout, device, dtype, mesh, pipeline, tensor)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    @property
    def stage_size(self) -> int:
        """The number of ranks of a pipeline stage; without stages, of all ranks."""
        return self.size // self.layout.pipeline_parallel

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("tensor")

    @property
    def held_on(self) -> torch.device:
        """The device on which the shards of parameters are."""
        return torch.device("cpu") if "parameters" in self.layout.offload else self.device

    def tensor_ranks_of(self, model: Any) -> TensorGroup | None:
        """Return the tensor ranks with which a model is divided by blocks; None if it is not."""
        in_blocks = runs_in_blocks(model.config, sequence=self.layout.sequence_parallel)
        return self.tensor if in_blocks else None

    # Sharding

    def shard(self, model: Any, others: Sequence[torch.nn.Module | None] = ()) -> None:
        """Keep this process's shard of a model, and of frozen or small modules that its forward pass also uses."""
        modules = [model, *(module for module in others if module is not None)]
        for module in (module for module in modules if hasattr(module, "config")):
            check_layout(self.layout if module is model else self.layout.without_experts(), self.size, module)
        if self.layout.context_parallel > 1:
            self.context = self.divide_context([module for module in modules if hasattr(module, "config")])
        if self.pipeline is not None:
            self.pipeline.cut(model)
        for module in modules:
            for owner in module.modules():
                for name, buffer in owner._buffers.items():
                    owner._buffers[name] = None if buffer is None else buffer.to(self.device)
            if self.tensor is not None and hasattr(module, "config"):
                divides_experts = module is model and self.layout.expert_parallel > 1
                summed = apply_tensor_parallel(
                    module, self.mesh["tensor"], self.device, self.tensor, with_experts=not divides_experts
                )
                self.summed = summed if module is model else self.summed
        if self.layout.expert_parallel > 1:
            mesh = self.expert_mesh["data", "tensor"]
            in_host = "parameters" in self.layout.offload
            self.exchange = ExpertExchange(mesh.get_group("data"), self.device, self.dtype, in_host=in_host)
            self.experts = shard_experts(model, mesh, self.held_on, self.exchange)
        self.root = FullParameters(modules)
        for module in modules:
            for layer in decoder_layers(module):
                self.apply_fsdp(layer)
        self.apply_fsdp(self.root)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        if self.unread:
            self.root._apply(lambda x: torch.empty_like(x, device=self.held_on) if x.is_meta else x)
            for read in self.unread:
                read()
            self.unread.clear()

    def divide_context(self, models: Sequence[Any]) -> ContextGroup:
        """Return the context ranks of these models, whose tokens are sliced alike."""
        sizes = self.layout.context_parallel, self.layout.tensor_parallel
        configs = [model.config.get_text_config() for model in models]
        ulysses = self.layout.ulysses_degree or choose_ulysses_degree(configs, *sizes)
        return make_context_group(dist.group.WORLD, self.device, *sizes, ulysses)

    def apply_fsdp(self, module: torch.nn.Module) -> None:
        """Shard one unit of FSDP, whose parameters are gathered together."""
        ignored = {parameter for experts in self.experts for parameter in experts.parameters()}
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
        options: dict[str, Any] = {"reshard_after_forward": after, "mp_policy": policy, "offload_policy": offload}
        mesh = self.mesh["data"] if self.layout.replicate == 1 else self.mesh["replicate", "data"]
        fully_shard(module, mesh=mesh, ignored_params=ignored, **options)

    # Computing

    def with_full_parameters(self, function: Callable[..., T], *args: Any) -> T:
        """Call the function while the parameters are gathered."""
        return self.root(function, *args)

    def reshard(self) -> None:
        """Free the gathered parameters after forward passes that have no backward pass."""
        if hasattr(self.root, "reset_iter_state"):  # newer torch: also forgets the order of the passes
            self.root.reset_iter_state()
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def in_lockstep(self, work: Sequence[T]) -> Iterator[T | None]:
        """Yield the items, then None until every rank has yielded as many: all must run the same number of passes."""
        most = torch.tensor(len(work), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        yield from work
        for _ in range(int(most) - len(work)):
            yield None

    # Gradients

    def set_last_micro_batch(self, last: bool) -> None:
        """Say whether the next backward pass is the last one before the gradients are used.

        Copies of the model sum their gradients only then; with defer_reduction the ranks of a copy do, too.
        """
        if self.layout.replicate > 1:
            self.root.set_requires_all_reduce(last)
        if self.layout.defer_reduction:
            self.root.set_requires_gradient_sync(last)

    @torch.no_grad()
    def reduce_replicated(self, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
        """Make the gradients of parameters that all tensor ranks hold equal on each rank, in place."""
        for name, parameter in self.unused_experts(gradients, parameters).items():
            gradients[name] = torch.zeros_like(local_shard(parameter))
        if self.experts and self.layout.expert_copies(self.size) > 1:  # FSDP leaves divided experts alone
            for name in sorted(self.expert_names(parameters) & gradients.keys()):
                total = gradients[name].to(self.device)  # it may be in host memory
                dist.all_reduce(total, group=self.expert_mesh.get_group("replicate"))
                gradients[name].copy_(total)
        size = self.layout.tensor_parallel
        for name, gradient in gradients.items():
            if size > 1 and not is_tensor_sharded(parameters[name]):
                total = gradient.to(self.device)  # it may be in host memory
                dist.all_reduce(total, group=self.tensor_group)
                # Summed: each rank has one term. Otherwise each has the same gradient, except for rounding.
                gradient.copy_(total if name in self.summed else total / size)
        if self.pipeline is not None:
            for name in self.pipeline.tied & parameters.keys() - gradients.keys():
                gradients[name] = torch.zeros_like(local_shard(parameters[name]))
            self.pipeline.add_tied_gradients(gradients)

    def unused_experts(
        self, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the trained experts of this rank that received no token: their gradient is 0, not missing."""
        return {name: parameters[name] for name in self.expert_names(parameters) - gradients.keys()}

    def expert_names(self, parameters: dict[str, torch.Tensor]) -> set[str]:
        """Return the names of the trained parameters of divided experts."""
        ids = {id(parameter) for experts in self.experts for parameter in experts.parameters()}
        return {name for name, parameter in parameters.items() if id(parameter) in ids}

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh of divided experts: `data` are the ranks that divide them, `replicate` those with the same ones."""
        sizes = self.layout.tensor_parallel, self.layout.expert_copies(self.size), self.layout.pipeline_parallel
        return make_mesh(dist.group.WORLD, self.device.type, *sizes)

    @torch.no_grad()
    def gradient_norm(self, gradients: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the norm over the shards of all ranks; what several ranks hold counts once."""
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double().to(self.device)
            split = torch.tensor([is_tensor_sharded(parameters[name]) for name in gradients], device=self.device)
            shares = torch.where(split, 1.0, 1 / self.layout.tensor_parallel)
            if self.pipeline is not None and self.pipeline.tied:  # the first and the last stage have the same
                tied = torch.tensor([name in self.pipeline.tied for name in gradients], device=self.device)
                shares = torch.where(tied, shares / 2, shares)
            if self.experts:
                experts, copies = self.expert_names(parameters), self.layout.expert_copies(self.size)
                divided = torch.tensor([name in experts for name in gradients], device=self.device)
                shares = torch.where(divided, shares * self.layout.replicate / copies, shares)
            total = (norms.square() * shares).sum()
        dist.all_reduce(total)
        return (total / self.layout.replicate).sqrt()

    # Files

    def whole_tensor(self, name: str, dtype: torch.dtype, live: torch.Tensor | None) -> torch.Tensor:
        """Gather a tensor from all ranks, also from other pipeline stages, where `live` is None."""

        def own() -> torch.Tensor:
            assert live is not None, f"this stage does not hold {name}"
            return full_tensor(local_shard(live).to(dtype), live)

        return own() if self.pipeline is None else self.pipeline.whole_tensor(name, dtype, own)

    def lazy_tensor(self, name: str, shard: torch.Tensor, like: torch.Tensor) -> LazyTensors:
        """Return one tensor of which all ranks hold a shard, to be written to a checkpoint."""
        shape = tuple(like.shape) if shard.ndim == like.ndim else tuple(shard.shape)
        return LazyTensors({name: (shape, shard.dtype)}, lambda: {name: full_tensor(shard, like)})

    def of_all_stages(self, entries: Sequence[LazyTensors]) -> list[LazyTensors]:
        """Return the entries of all pipeline stages, in the same order on every rank; tied tensors once.

        Those of other stages are written by their ranks and cannot be fetched here.
        """
        if self.pipeline is None:
            return list(entries)
        per_stage, found, known = self.stage_size, list[LazyTensors](), set[str]()
        for stage, kinds in enumerate(self.pipeline.exchange([entry.kinds_as_json() for entry in entries])):
            writers = range(stage * per_stage, (stage + 1) * per_stage)
            for number, kind in enumerate(kinds):
                if known & kind.keys():
                    continue
                known |= kind.keys()
                entry = entries[number] if stage == self.pipeline.rank else LazyTensors.from_json(kind)
                found.append(replace(entry, writers=writers))
        return found

    def tensors_of_all_stages(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the full tensors of all pipeline stages, by name, on every rank."""
        if self.pipeline is None:
            return tensors
        found: dict[str, torch.Tensor] = {}
        described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        for stage, (kinds,) in enumerate(self.pipeline.exchange([LazyTensors(described, dict).kinds_as_json()])):
            for name, (shape, dtype) in LazyTensors.from_json(kinds).kinds.items():
                mine = stage == self.pipeline.rank
                tensor = tensors[name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=self.device)
                found[name] = self.pipeline.broadcast(tensor, stage)
        return found


def anchor_outputs(total: torch.Tensor, out: Outputs) -> torch.Tensor:
    """Return `total` unchanged, but make every computed output part of its backward pass, with a gradient of zero.

    If the loss left an output unused, some parameters would get no gradient, and FSDP would wait for them forever.
    """
    outputs = [getattr(out, name) for name in Outputs.__slots__]
    return AnchorOutputs.apply(total, *(x for x in outputs if x is not None and x.requires_grad))  # type: ignore[no-any-return]


class AnchorOutputs(torch.autograd.Function):
    """Returns its first argument; the others get a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in outputs]
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], *(torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.likes)


def decoder_layers(module: Any) -> list[torch.nn.Module]:
    """Return the units that FSDP gathers together: the blocks that the model family declares inseparable."""
    names = set(getattr(module, "_no_split_modules", None) or ())
    return [part for part in module.modules() if type(part).__name__ in names]


# Copies to generate with


def meta_copy(model: Any) -> Any:
    """Copy a model without its weights, from which `materialize` makes full copies later."""
    empty = {id(p): torch.nn.Parameter(p.detach().to("meta"), requires_grad=False) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def materialize(meta_model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model like the one on the meta device, with uninitialised weights that keep their addresses."""
    weights = {
        id(p): torch.nn.Parameter(torch.empty_like(p, device=device, dtype=dtype), requires_grad=False)
        for p in meta_model.parameters()
    }
    return copy.deepcopy(meta_model, weights).to(device).eval()


__all__ = ["ModelShards", "anchor_outputs", "materialize", "meta_copy"]
