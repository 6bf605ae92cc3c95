"""Pipeline parallelism: each stage holds some consecutive layers, and hidden states are sent from stage to stage.

The order of forward and backward passes and of transfers is that of torch.distributed.pipelining: 1F1B, or interleaved
1F1B where a rank holds several stages (stage s is on pipeline rank s mod ranks). The passes are run here and not by
torch's PipelineStage, which allocates its receive buffers once, for one shape: micro-batches are packed, and each has
another number of tokens. All stages pack the same samples, so each knows the shape of what it receives, and nothing
but hidden states and their gradients is sent. The last stage computes the outputs and the loss.

A stage keeps the names that its parameters have in the whole model: layers of other stages are replaced by modules that
return their input. Tied embeddings are held by the first and the last stage, which add up their gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from posttrain.core.errors import UsageError

DENSE = ("gemma2", "llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*DENSE, "deepseek_v2", "deepseek_v3", "mixtral", "qwen2_moe", "qwen3_moe")
"""Families whose stages were compared with the whole model."""

PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}  # of a decoder that can be cut between two layers
HEADS = ("lm_head", "score")
ELSEWHERE = "tensors_of_other_stages"  # attribute of a model that was cut: names and shapes

B = TypeVar("B")
T = TypeVar("T")


class StageInput(NamedTuple):
    """Which stage a pass runs, and the hidden states [1, T, H] that it continues; None in the first stage."""

    stage: int
    hidden: torch.Tensor | None


class SkippedLayer(torch.nn.Module):
    """Stands for a layer, or the last norm, of another stage: returns its input."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class AbsentModule(torch.nn.Module):
    """Stands for embeddings or a head of another stage, which this stage never runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this module belongs to another pipeline stage")


@dataclass(slots=True, eq=False)
class Pipeline:
    """The ranks that hold the stages of one model for the same samples, and this rank's stages."""

    group: dist.ProcessGroup
    rank: int
    size: int
    virtual: int  # stages per rank
    listed: tuple[int, ...]  # layers of each stage; empty: equally many, as far as possible
    device: torch.device
    bounds: list[tuple[int, int]] = field(
        default_factory=list
    )  # first layer and end of each stage, once a model is cut
    owners: dict[str, int] = field(default_factory=dict)  # tensor of the whole model -> first rank that holds it
    shapes: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)  # of the same tensors
    parameters: frozenset[str] = frozenset()  # those of them that are not buffers
    tied: frozenset[str] = frozenset()  # parameters that the first and the last rank both hold
    layers: dict[int, torch.nn.Module] = field(default_factory=dict)  # of this rank, by number
    norm: torch.nn.Module | None = None  # of the last stage, if it is here

    @property
    def stages(self) -> int:
        return self.size * self.virtual

    @property
    def is_last(self) -> bool:
        """Whether the last stage, which computes outputs and loss, is on this rank."""
        return self.rank == self.size - 1

    def is_last_stage(self, stage: int) -> bool:
        return stage == self.stages - 1

    # The model

    def cut(self, model: Any) -> None:
        """Keep the layers of this rank's stages, and embeddings or head if they belong to these."""
        base = getattr(model, model.base_model_prefix)
        self.bounds = stage_bounds(len(base.layers), self.stages, self.listed)
        state = model.state_dict(keep_vars=True)
        unique = {id(tensor): name for name, tensor in reversed(state.items())}  # tied ones by their first name
        names = [name for name in state if unique[id(state[name])] == name]
        self.owners = {name: owner_of(name, model.base_model_prefix, self.bounds, self.size) for name in names}
        self.shapes = {name: (state[name].shape, state[name].dtype) for name in names}
        self.parameters = frozenset(name for name in names if isinstance(state[name], torch.nn.Parameter))
        embedding = base.embed_tokens.weight
        tied = has_tied_head(model)
        self.tied = frozenset({unique[id(embedding)]} if tied else ())
        for stage in range(self.rank, self.stages, self.size):
            self.layers |= {number: base.layers[number] for number in range(*self.bounds[stage])}
        for number in range(len(base.layers)):
            if number not in self.layers:
                base.layers[number] = SkippedLayer()
        if self.rank != 0 and not (tied and self.is_last):
            base.embed_tokens = AbsentModule()
        if self.is_last:
            self.norm = base.norm
        else:
            base.norm = SkippedLayer()
            for head in HEADS:
                if hasattr(model, head):
                    setattr(model, head, AbsentModule())
        held = model.state_dict(keep_vars=True).keys()
        setattr(model, ELSEWHERE, {name: self.shapes[name][0] for name in names if name not in held})

    @contextmanager
    def selected(self, model: Any, stage: int) -> Iterator[None]:
        """Let the model's forward pass in the block run one of the stages of this rank."""
        if self.virtual == 1:
            yield
            return
        base, norm = getattr(model, model.base_model_prefix), self.norm
        first, end = self.bounds[stage]
        others = [number for number in self.layers if not first <= number < end]
        for number in others:
            base.layers._modules[str(number)] = SkippedLayer()
        if norm is not None and not self.is_last_stage(stage):
            base._modules["norm"] = SkippedLayer()
        try:
            yield
        finally:
            for number in others:
                base.layers._modules[str(number)] = self.layers[number]
            if norm is not None:
                base._modules["norm"] = norm

    # Passes

    def padded_count(self, count: int) -> int:
        """Return the number of micro-batches, with dummy batches, that the schedule can run."""
        if self.virtual == 1:
            return count
        while count % max(1, count // self.size):  # a condition of torch's interleaved schedule
            count += 1
        return count

    def run(
        self,
        batches: Sequence[B],
        compute: Callable[[B, StageInput], T],
        like: Callable[[B], torch.Tensor],
        backward: Callable[[bool, Callable[[], None]], None] | None = None,
    ) -> list[T]:
        """Run all micro-batches through the stages; return what the last stage computed, on other ranks nothing.

        `compute` returns hidden states, or in the last stage its result; `like` returns an empty tensor of the shape
        of the hidden states. With `backward` the result is a loss, and `backward` is called for each backward pass,
        with whether it is the last one of its stage, and with the pass.
        """
        run = PipelineRun(self, batches, compute, like, backward)
        for kind, stage, index in actions_of(self.size, self.virtual, len(batches), self.rank):
            if backward is not None or kind in ("F", "SEND_F", "RECV_F"):
                getattr(run, kind.lower())(stage, index)
        run.finish()
        return [run.results[index] for index in range(len(batches))] if self.is_last else []

    # Tensors

    def exchange(self, mine: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return what each rank passes, as JSON can hold it, on all ranks."""
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(self.device)
        found = []
        for rank in range(self.size):
            size = self.broadcast(torch.tensor(len(text), device=self.device), rank)
            part = text if rank == self.rank else torch.empty(int(size), dtype=torch.uint8, device=self.device)
            found.append(json.loads(bytes(self.broadcast(part, rank).tolist())))
        return found

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Send a tensor of one rank to all others, in place."""
        dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def from_last(self, values: torch.Tensor) -> torch.Tensor:
        """Send values of the last rank to all others, in place."""
        return self.broadcast(values, self.size - 1)

    def whole_tensor(self, name: str, dtype: torch.dtype, found: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return a tensor of the whole model on all ranks; `found` gathers it, as `dtype`, where it is held."""
        if self.owners[name] == self.rank:
            return self.broadcast(found().contiguous(), self.rank)
        return self.broadcast(torch.empty(self.shapes[name][0], dtype=dtype, device=self.device), self.owners[name])

    @torch.no_grad()
    def add_tied_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Add up the gradients of tied embeddings, which the first and the last rank both have a part of."""
        if self.rank not in (0, self.size - 1):
            return
        for name in sorted(self.tied & gradients.keys()):
            mine = gradients[name].to(self.device).contiguous()
            other = torch.empty_like(mine)
            peer = self.size - 1 - self.rank
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
                    dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
                ]
            ):
                work.wait()
            gradients[name].copy_(mine + other)


class PipelineRun:
    """One run of all micro-batches; its methods are the actions of a schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Sequence[Any],
        compute: Callable[[Any, StageInput], Any],
        like: Callable[[Any], torch.Tensor],
        backward: Callable[[bool, Callable[[], None]], None] | None,
    ) -> None:
        self.pipeline, self.batches, self.compute, self.like = pipeline, batches, compute, like
        self.backward_with = backward
        self.inputs: dict[tuple[int, int], torch.Tensor] = {}  # hidden states by stage and micro-batch
        self.outputs: dict[tuple[int, int], Any] = {}
        self.gradients: dict[tuple[int, int], torch.Tensor] = {}
        self.waiting: dict[Any, list[Any]] = {}  # receives that have been started
        self.sent: list[tuple[list[Any], torch.Tensor]] = []  # with the tensors, which must live until they are sent
        self.results: dict[int, Any] = {}

    def f(self, stage: int, index: int) -> None:
        place = stage, index
        self.wait("F", place)
        hidden = self.inputs.get(place)
        if hidden is not None and self.backward_with is not None:
            hidden.requires_grad_()
        result = self.compute(self.batches[index], StageInput(stage, hidden))
        if self.backward_with is not None or not self.pipeline.is_last_stage(stage):
            self.outputs[place] = result
        if self.pipeline.is_last_stage(stage):
            self.results[index] = result.detach() if self.backward_with is not None else result
        if self.backward_with is None:
            self.inputs.pop(place, None)

    def b(self, stage: int, index: int) -> None:
        assert self.backward_with is not None
        place = stage, index
        self.wait("B", place)
        output, gradient = self.outputs.pop(place), self.gradients.pop(place, None)
        if output.requires_grad:  # else nothing of this stage and of those before it is trained
            last = index == len(self.batches) - 1
            self.backward_with(last, lambda: torch.autograd.backward(output, gradient))

    def send_f(self, stage: int, index: int) -> None:
        output = self.outputs[stage, index]
        self.send(output.detach(), stage + 1)
        if self.backward_with is None:
            del self.outputs[stage, index]

    def send_b(self, stage: int, index: int) -> None:
        hidden = self.inputs.pop((stage, index))
        self.send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, stage - 1)

    def recv_f(self, stage: int, index: int) -> None:
        self.inputs[stage, index] = self.receive("F", (stage, index), stage - 1)

    def recv_b(self, stage: int, index: int) -> None:
        self.gradients[stage, index] = self.receive("B", (stage, index), stage + 1)

    def send(self, tensor: torch.Tensor, stage: int) -> None:
        tensor = tensor.contiguous()
        peer = stage % self.pipeline.size
        operation = dist.P2POp(dist.isend, tensor, group=self.pipeline.group, group_peer=peer)
        self.sent.append((dist.batch_isend_irecv([operation]), tensor))
        while self.sent and all(work.is_completed() for work in self.sent[0][0]):
            self.sent.pop(0)

    def receive(self, kind: str, place: tuple[int, int], stage: int) -> torch.Tensor:
        tensor = self.like(self.batches[place[1]])
        peer = stage % self.pipeline.size
        operation = dist.P2POp(dist.irecv, tensor, group=self.pipeline.group, group_peer=peer)
        self.waiting[kind, place] = dist.batch_isend_irecv([operation])
        return tensor

    def wait(self, kind: str, place: tuple[int, int]) -> None:
        for work in self.waiting.pop((kind, place), ()):
            work.wait()

    def finish(self) -> None:
        for works, _ in self.sent:
            for work in works:
                work.wait()
        self.sent.clear()


@lru_cache(maxsize=64)
def schedule(size: int, virtual: int, count: int) -> dict[int, list[tuple[str, int, int]]]:
    """Return what each pipeline rank does in a step of `count` micro-batches: (action, stage, micro-batch).

    Actions are F and B, forward and backward pass, and SEND_ and RECV_ of their results. Transfers are in an order in
    which no two ranks wait for each other.
    """
    from torch.distributed.pipelining import schedules

    forward, backward = schedules._ComputationType.FORWARD, schedules._ComputationType.FULL_BACKWARD
    # torch reads nothing else of its stages to compute an order
    places: Any = [SimpleNamespace(num_stages=size * virtual, group_size=size, group_rank=0) for _ in range(virtual)]
    if virtual > 1:
        order: Any = schedules.ScheduleInterleaved1F1B(places, count)
    else:  # for any number of micro-batches; torch's own class needs as many as stages
        order = schedules._PipelineScheduleRuntime(places, count)
        actions: dict[int, list[Any]] = {}
        for rank in range(size):
            first = min(count, size - 1 - rank)
            pairs = [(forward, i) for i in range(first)]
            for index in range(count - first):
                pairs += [(forward, first + index), (backward, index)]
            pairs += [(backward, index) for index in range(count - first, count)]
            actions[rank] = [schedules._Action(rank, kind, index) for kind, index in pairs]
        order._prepare_schedule_with_comms(actions)
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"} | {name: name for name in ("SEND_F", "SEND_B", "RECV_F", "RECV_B")}
    return {
        rank: [
            (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in found
            if action.computation_type.name in kinds  # FSDP gathers and reduces by itself
        ]
        for rank, found in order.pipeline_order_with_comms.items()
    }


def actions_of(size: int, virtual: int, count: int, rank: int) -> list[tuple[str, int, int]]:
    return schedule(size, virtual, count)[rank] if count else []


def owner_of(name: str, prefix: str, bounds: Sequence[tuple[int, int]], size: int) -> int:
    """Return the first of `size` ranks that holds a tensor; `prefix`: of the decoder's names, `bounds`: of stages."""
    part, _, rest = name.removeprefix(f"{prefix}.").partition(".")
    if part == "layers":
        number = int(rest.partition(".")[0])
        return next(stage for stage, (first, end) in enumerate(bounds) if first <= number < end) % size
    return size - 1 if part in ("norm", *HEADS) else 0


def has_tied_head(model: Any) -> bool:
    """Whether the head is the matrix of the embeddings, which the first and the last stage both need."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def parameters_of_rank(
    model: Any, rank: int, size: int, virtual: int, listed: Sequence[int]
) -> Iterator[tuple[str, Any]]:
    """Yield the parameters of a whole model that one pipeline rank holds, by name."""
    prefix, tied = model.base_model_prefix, has_tied_head(model)
    bounds = stage_bounds(len(getattr(model, prefix).layers), size * virtual, listed)
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        also = tied and parameter is embedding and rank == size - 1
        if also or owner_of(name, prefix, bounds, size) == rank:
            yield name, parameter


def passes_in_flight(layers: int, size: int, virtual: int, listed: Sequence[int]) -> float:
    """Return how many whole passes' activations the busiest rank holds at once; of layers, without the head."""
    if size == 1:
        return 1.0
    counts = [end - first for first, end in stage_bounds(layers, size * virtual, listed)]
    if virtual == 1:
        return max((size - stage) * count for stage, count in enumerate(counts)) / layers
    held = ((virtual - 1) * size + 2 * (size - 1 - rank) + 1 for rank in range(size))
    return max(passes * max(counts[rank::size]) for rank, passes in enumerate(held)) / layers


def tensors_elsewhere(model: Any) -> dict[str, torch.Size]:
    """Return names and shapes of the tensors that other pipeline stages hold; none of a model that was not cut."""
    return getattr(model, ELSEWHERE, {})


def stage_bounds(layers: int, stages: int, listed: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the first layer and the end of each stage; without a list, the first stages get the remainder.

    The last stage also computes the head: where layers do not divide, it is one of those with fewer of them.
    """
    counts = list(listed) or [layers // stages + (stage < layers % stages) for stage in range(stages)]
    return list(pairwise(accumulate(counts, initial=0)))


def check_pipeline_parallel(model: Any, size: int, virtual: int, listed: Sequence[int]) -> None:
    """Raise UsageError if the layers of this model cannot be divided into these stages."""
    config = model.config
    base = getattr(model, model.base_model_prefix)
    parts = {name for name, _ in base.named_children()}
    if config.model_type not in FAMILIES or parts != PARTS:
        raise UsageError(
            f"cluster.pipeline_parallel_size is {size}, but {type(model).__name__} ({config.model_type}) cannot be "
            f"divided into stages here; {', '.join(FAMILIES)} can. Leave it at 1: "
            "cluster.zero_stage 3 shards every model."
        )
    layers, stages = len(base.layers), size * virtual
    if listed and (len(listed) != stages or sum(listed) != layers or min(listed) < 1):
        raise UsageError(
            f"cluster.pipeline_layers_per_stage is {' '.join(map(str, listed))}, but this {config.model_type} model "
            f"has {layers} layers, and cluster.pipeline_parallel_size {size} times "
            f"cluster.virtual_pipeline_parallel_size {virtual} makes {stages} stages: give {stages} numbers of at "
            f"least 1 whose sum is {layers}."
        )
    if layers < stages:
        raise UsageError(
            f"cluster.pipeline_parallel_size {size} times cluster.virtual_pipeline_parallel_size {virtual} makes "
            f"{stages} stages, but this {config.model_type} model has {layers} layers, and each stage needs one."
        )


__all__ = [
    "AbsentModule",
    "Pipeline",
    "SkippedLayer",
    "StageInput",
    "check_pipeline_parallel",
    "parameters_of_rank",
    "passes_in_flight",
    "stage_bounds",
    "tensors_elsewhere",
]
