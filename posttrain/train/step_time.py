"""Simulates the time of a training step: compute, memory traffic and communication, from published rates.

A pass over a micro-batch of T tokens on one device costs, forward:

    matrix products   2 FLOPs per weight that a token uses and per token; the backward pass twice as many
    attention         2 FLOPs per pair of tokens and number in queries, keys and values; backward 2.5 times as many
    other kernels     bytes that gates, norms and logits move, at the rate of the device's memory
    gathering         FSDP's other shards, 2 bytes per parameter forward and again backward (zero_stage 3), and 4 bytes
                      per trained parameter of gradients to reduce; hidden behind computation as far as that is longer
    tensor parallel   2 sums of the hidden states per layer forward and backward
    context parallel  queries, keys, values and outputs exchanged in every layer; in a ring, keys and values received
                      once per forward pass, and once with their gradients backward, hidden behind attention
    expert parallel   each token to its experts and back
    pipeline          the layers of the last stage, which has the head; stages are idle for (stages - 1) micro-batches

and a decode step reads all weights and the keys and values of every active sequence. The shares of the published rates
below were fitted to single-GPU figures of bench/results.md; tests/unit/train/test_step_time.py compares these, and
others that were measured later. The share of the links is an assumption: several devices have not been measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from posttrain.core.device_rates import DeviceRates
from posttrain.models.memory import Sharding
from posttrain.models.work import ModelWork
from posttrain.parallel.context import ulysses_degrees
from posttrain.parallel.weight_transfer import MAX_GROUPS

# Shares of the published rates that were reached on one H200.
PRODUCT_SHARE, PRODUCT_WIDTH = 0.765, 180  # of matrix products: PRODUCT_SHARE * hidden / (hidden + PRODUCT_WIDTH)
# Of the rate of products, for attention in training by torch's kernel, which is faster for long samples:
ATTENTION_SHARE, ATTENTION_LENGTH = 0.50, 950  # ATTENTION_SHARE * length / (length + ATTENTION_LENGTH)
MEMORY_SHARE = 0.83
LINK_SHARE = 0.8  # not measured
DECODE_OVERLAP = 0.35  # of the shorter of reading and computing that is not hidden behind the longer one
FP8_SPEEDUP = 1.5  # of products with 8-bit weights over those in bfloat16; half the bytes

# Bytes that kernels other than products and attention move, per token and number.
GATE_BYTES, HIDDEN_BYTES = (6, 12), (16, 40)  # forward, backward
LOGIT_BYTES = (4, 6)
GRADIENT_BYTES = 8  # per trained parameter and micro-batch: read and written as they are accumulated
OPTIMIZER_BYTES = 34  # per trained parameter: gradient, two moments and master weight, read and written
LAUNCH_SECONDS = 350e-6  # of the host per layer and micro-batch, forward and backward; hidden behind longer kernels
IDLE_SECONDS = 14e-3  # per micro-batch: gaps between kernels, packing, the loss
DECODE_LAYER_SECONDS = 26e-6  # per layer and decode step: kernels that are too short to reach any rate
SUM_SECONDS = 12e-6  # of one small sum over the devices of an engine
DECODE_POINTS = 48  # moments of a generation at which a decode step is computed


@dataclass(slots=True, frozen=True)
class Machines:
    """The devices and how they are connected."""

    rates: DeviceRates
    devices_per_machine: int = 8

    @property
    def memory(self) -> float:
        return MEMORY_SHARE * self.rates.memory

    def products(self, hidden: int) -> float:
        """Return FLOPs per second of a model's matrix products: narrow matrices are slower."""
        return PRODUCT_SHARE * self.rates.flops * hidden / (hidden + PRODUCT_WIDTH)

    def attention(self, hidden: int, length: float) -> float:
        """Return FLOPs per second of attention, forward and backward, to samples of this mean length."""
        return self.products(hidden) * ATTENTION_SHARE * length / (length + ATTENTION_LENGTH)

    def bandwidth(self, ranks: int, stride: int) -> float:
        """Return bytes per second at which a rank receives in a collective of `ranks` ranks, `stride` devices apart.

        Across machines all ranks of the group on one machine receive at the same time, each over its own port.
        """
        if ranks * stride <= self.devices_per_machine:
            return LINK_SHARE * self.rates.link
        together = max(1, self.devices_per_machine // stride)
        return LINK_SHARE * min(self.rates.link, together * self.rates.network)

    def gather_seconds(self, size: float, ranks: int, stride: int) -> float:
        """Return the time to gather `size` bytes of which each rank has a part, or to reduce and scatter them."""
        return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / self.bandwidth(ranks, stride)

    def sum_seconds(self, size: float, ranks: int, stride: int) -> float:
        return 2 * self.gather_seconds(size, ranks, stride)

    def exchange_seconds(self, size: float, ranks: int, stride: int) -> float:
        """Return the time in which each rank sends an equal part of `size` bytes to every rank, over its own port."""
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.devices_per_machine // stride))
        inside = size * (near - 1) / ranks / (LINK_SHARE * self.rates.link)
        return inside + size * (ranks - near) / ranks / (LINK_SHARE * self.rates.network)


@dataclass(slots=True, frozen=True, kw_only=True)
class StepWork:
    """What one step processes, over all devices."""

    tokens: float  # that go through the layers; a prompt that neighbours share counts once
    counted: float  # that have logits
    squares: float  # sum of squared sample lengths
    micro_batch_tokens: int
    checkpointing: bool = False
    separable: bool = True  # logits are computed once, not again in the backward pass
    updates: int = 1  # optimizer steps, which divide the tokens among themselves
    epochs: int = 1  # passes over all tokens


@dataclass(slots=True)
class StepTime:
    """Seconds of a step by what they are spent on."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def add(self, other: StepTime, times: float = 1.0) -> None:
        for name, seconds in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + times * seconds

    def largest(self) -> str:
        """Return what takes the most time."""
        return max(self.parts, key=lambda name: self.parts[name])


GATHERING, SUMS = "gathering parameters", "tensor-parallel sums"
CONTEXT, RING = "context exchange", "ring attention"
EXPERTS, COPIES, TRANSFER = "expert exchange", "gradients of copies", "weight transfer"
STAGES, BUBBLE = "sending between stages", "idle pipeline stages"


def pass_seconds(
    work: ModelWork,
    machines: Machines,
    sharding: Sharding,
    step: StepWork,
    *,
    backward: bool,
    offload: bool = False,
    host_activations: bool = False,
) -> StepTime:
    """Return the time of one pass over all tokens of a step, in micro-batches; without `backward`, forward only."""
    work = busiest_stage(work, sharding)
    ranks, tensor, context = sharding.data_parallel_size, sharding.tensor, sharding.context
    share = 1 / (ranks * context)  # of the tokens on one device
    tokens, counted = step.tokens * share, step.counted * share
    count = micro_batches(step, sharding)
    again = backward and step.checkpointing  # the forward pass of the layers is computed twice
    forwards, rate = 1 + again, machines.products(work.hidden)
    gradient = (1 + work.trained_share) * backward
    products = 2 * work.used_weights * tokens / tensor * (forwards + gradient)
    logits = 1 + (2 if work.trained_share == 1 else 1) * backward + (not step.separable) * backward
    outside = tensor if sharding.sequence else 1  # ranks that divide what is between attention and MLPs
    products += 2 * work.head_weights * counted * logits / outside
    attention = work.attention_flops(step.squares) * share / tensor * (forwards + 2.5 * backward)
    moved = work.gates * tokens / tensor * (GATE_BYTES[0] * forwards + GATE_BYTES[1] * backward)
    moved += work.layers * work.hidden * tokens / outside * (HIDDEN_BYTES[0] * forwards + HIDDEN_BYTES[1] * backward)
    moved += work.vocabulary * counted / outside * (LOGIT_BYTES[0] + LOGIT_BYTES[1] * backward)
    if backward:
        moved += GRADIENT_BYTES * count * work.trained / tensor / (sharding.experts if work.expert_weights else 1)
    parts = {
        "matrix products": products / rate,
        "attention": attention / machines.attention(work.hidden, step.squares / step.tokens),
        "other kernels": moved / machines.memory,
    }
    kernels = sum(parts.values())
    launches = count * work.layers * LAUNCH_SECONDS * (forwards + 2 * backward) / 3
    parts["host"] = max(0.0, launches - kernels) + count * IDLE_SECONDS * (1 + 2 * backward) / 3
    sums = forwards + backward * (1.5 if sharding.sequence else 1)  # tokens are gathered once more, half a sum
    parts[SUMS] = work.layers * machines.sum_seconds(2 * work.element_size * tokens * work.hidden * sums, tensor, 1)
    exchanged = work.element_size * tokens * work.exchanged_width / tensor * (forwards + backward)
    ulysses = sharding.ulysses or max(ulysses_degrees(work.heads // tensor, work.kv_heads // tensor, context))
    parts[CONTEXT] = work.layers * machines.exchange_seconds(exchanged, ulysses, tensor)
    places = max(1, context // ulysses)
    sent = work.layers * work.element_size * ring_tokens(step, sharding, places) * work.kv_width / (tensor * ulysses)
    sending = sent * (forwards + 2 * backward) / machines.bandwidth(places, tensor * ulysses)
    parts[RING] = max(0.0, sending - parts["attention"])
    sent = 2 * work.element_size * tokens * work.experts_per_token * work.hidden * (forwards + backward)
    parts[EXPERTS] = work.expert_layers * machines.exchange_seconds(sent, sharding.experts, tensor)
    gathered = count * gather_seconds(work, machines, sharding, backward=backward)
    if offload:  # shards come from host memory, gradients go there
        shard = work.parameters / (sharding.data * tensor) * sharding.replicate
        parts["host transfers"] = count * shard * (4 + (4 + 4 * work.trained / work.parameters) * backward)
        parts["host transfers"] /= LINK_SHARE * machines.rates.host
    if again and host_activations:  # the inputs of layers, there and back, while layers compute
        moved = 2 * work.layers * work.element_size * tokens * work.hidden / (LINK_SHARE * machines.rates.host)
        parts["host transfers"] = parts.get("host transfers", 0.0) + max(0.0, moved - kernels)
    parts[GATHERING] = max(0.0, gathered - kernels)
    if sharding.pipeline > 1:
        boundary = work.element_size * tokens * work.hidden / outside * (1 + backward) * sharding.virtual
        parts[STAGES] = boundary / machines.bandwidth(2, sharding.data * tensor)
        parts[BUBBLE] = sum(parts.values()) * (sharding.pipeline - 1) / (sharding.virtual * count)
    return StepTime({name: seconds for name, seconds in parts.items() if seconds})


def ring_tokens(step: StepWork, sharding: Sharding, ring: int) -> float:
    """Return the tokens whose keys and values a rank of a ring receives in a pass over a step.

    Those of the other places, but of no more tokens per row than a sample has: others are not sent.
    """
    share = step.tokens / sharding.data_parallel_size
    rows = share / (step.micro_batch_tokens * sharding.context)
    return min(share * (ring - 1) / ring, rows * step.squares / step.tokens)


def busiest_stage(work: ModelWork, sharding: Sharding) -> ModelWork:
    """Return the work of the pipeline's last rank: its share of the layers, and the head."""
    if sharding.pipeline == 1:
        return work
    dense, experts = work.dense_weights // sharding.pipeline, work.expert_weights // sharding.pipeline
    parameters = dense + experts + work.head_weights
    return replace(
        work,
        layers=math.ceil(work.layers / sharding.pipeline),
        gates=work.gates // sharding.pipeline,
        dense_weights=dense,
        expert_weights=experts,
        expert_layers=math.ceil(work.expert_layers / sharding.pipeline),
        parameters=parameters,
        trained=round(parameters * work.trained / work.parameters),
    )


def micro_batches(step: StepWork, sharding: Sharding) -> int:
    """Return the number of micro-batches of one device in one pass over a step."""
    budget = step.micro_batch_tokens * sharding.context
    return step.updates * math.ceil(step.tokens / step.updates / sharding.data_parallel_size / budget)


def gather_seconds(work: ModelWork, machines: Machines, sharding: Sharding, *, backward: bool) -> float:
    """Return the time of FSDP's communication in one micro-batch, if nothing else went on."""
    ranks, tensor = sharding.data // sharding.replicate, sharding.tensor
    staying = work.expert_weights if sharding.experts > 1 else 0
    size = (work.parameters - staying) / tensor
    reduced = max(0.0, work.trained - staying * (work.trained == work.parameters)) / tensor
    gathers = 1 + (backward and sharding.zero == 3)
    seconds = machines.gather_seconds(work.element_size * size * gathers, ranks, tensor)
    if backward and not sharding.deferred:
        seconds += machines.gather_seconds(4 * reduced, ranks, tensor)
    return seconds


def update_seconds(
    work: ModelWork, machines: Machines, sharding: Sharding, *, host_moments: bool = False, offload: bool = False
) -> StepTime:
    """Return the time of an optimizer step, with the communication that is left for it."""
    work = busiest_stage(work, sharding)
    copies, ranks = sharding.replicate, sharding.data // sharding.replicate
    shard = work.trained / (sharding.tensor * ranks)
    parts = {"optimizer": OPTIMIZER_BYTES * shard / machines.memory}
    if host_moments:
        parts["host transfers"] = 16 * shard / (LINK_SHARE * machines.rates.host)
    if offload:  # on the host's processors, whose memory the devices of a machine share
        parts["optimizer"] = OPTIMIZER_BYTES * shard / (LINK_SHARE * machines.rates.host)
    if sharding.deferred:
        parts[GATHERING] = machines.gather_seconds(4 * work.trained / sharding.tensor, ranks, sharding.tensor)
    parts[COPIES] = machines.sum_seconds(4 * shard, copies, sharding.tensor * ranks)
    return StepTime({name: seconds for name, seconds in parts.items() if seconds})


def train_seconds(
    work: ModelWork, machines: Machines, sharding: Sharding, step: StepWork, offload: Iterable[str] = ()
) -> StepTime:
    """Return the time of all passes and updates of a step."""
    held = "parameters" in offload
    total = StepTime()
    how = {"offload": held, "host_activations": "activations" in offload}
    total.add(pass_seconds(work, machines, sharding, step, backward=True, **how), step.epochs)
    moments = "moments" in offload
    total.add(update_seconds(work, machines, sharding, host_moments=moments, offload=held), step.updates * step.epochs)
    return total


# Generation


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationWork:
    """Completions of one step, and the engines that make them."""

    prompts: int  # different ones
    completions: int
    prompt_tokens: float  # mean length
    completion_tokens: float  # mean length
    max_tokens: int  # longest length; above the mean, lengths are geometric
    cache_bytes: int  # of one position in all layers
    engines: int
    devices_per_engine: int = 1
    slots: int = 512  # sequences that one engine generates at a time
    in_8_bits: bool = False


def generation_seconds(work: ModelWork, machines: Machines, job: GenerationWork) -> StepTime:
    """Return the time in which the engines generate the completions of a step."""
    per_engine = math.ceil(job.completions / job.engines)
    active, waves = min(per_engine, job.slots), max(1.0, per_engine / job.slots)
    prompts = math.ceil(job.prompts / job.engines) if job.prompts >= job.engines else 1
    sharding = Sharding(1, job.devices_per_engine)
    tokens = prompts * job.prompt_tokens
    prefill = StepWork(
        tokens=tokens,
        counted=prompts,
        squares=tokens * job.prompt_tokens,
        micro_batch_tokens=max(1, math.ceil(tokens)),
    )
    parts = {"prefill": pass_seconds(work, machines, sharding, prefill, backward=False).seconds}
    mean, end = mean_and_end(job, active)
    for number in range(DECODE_POINTS):
        position = (number + 0.5) * end / DECODE_POINTS
        share = math.exp(-position / mean)  # of the completions that are as long
        running = share_of_any(share, active)  # else all have ended, and the engine with them
        step = decode_seconds(work, machines, job, active * share / running, job.prompt_tokens + position)
        for name, seconds in step.items():
            parts[name] = parts.get(name, 0.0) + seconds * running * waves * end / DECODE_POINTS
    return StepTime(parts)


def mean_and_end(job: GenerationWork, active: int) -> tuple[float, float]:
    """Return the mean of the lengths, infinite if all completions have max_tokens, and a length that none exceeds."""
    if job.completion_tokens >= job.max_tokens:
        return math.inf, job.max_tokens
    mean = untruncated_mean(job.completion_tokens, job.max_tokens)
    return mean, min(job.max_tokens, mean * (math.log(active) + 8))  # above that with a probability of e**-8


def share_of_any(share: float, count: int) -> float:
    """Return the probability that at least one of `count` completions is so long, where each is with this one."""
    return 1.0 if share == 1 else -math.expm1(count * math.log1p(-share))


def untruncated_mean(mean: float, longest: int) -> float:
    """Return the mean of the exponential distribution whose values, cut off at `longest`, have the given mean."""
    low, high = mean / 2, 1e6 * longest
    for _ in range(100):
        middle = math.sqrt(low * high)
        if middle * -math.expm1(-longest / middle) < mean:
            low = middle
        else:
            high = middle
    return low


def decode_seconds(
    work: ModelWork, machines: Machines, job: GenerationWork, sequences: float, position: float
) -> dict[str, float]:
    """Return the time of one decode step of an engine."""
    devices, element = job.devices_per_engine, work.element_size
    used = 1 - (1 - work.used_share) ** sequences  # share of the experts that some token is sent to
    layers = work.dense_weights + used * work.expert_weights
    smaller, faster = (0.5, FP8_SPEEDUP) if job.in_8_bits else (1.0, 1.0)
    read = element * (layers * smaller + work.head_weights) / devices / machines.memory
    rate = machines.products(work.hidden)
    computed = 2 * sequences * (work.used_weights / faster + work.head_weights) / devices / rate
    moved = sequences * (work.gates / devices * GATE_BYTES[0] + work.layers * work.hidden * HIDDEN_BYTES[0])
    moved += sequences * work.vocabulary * 3 * LOGIT_BYTES[0] / devices
    parts = {
        "decoding: weights" if read > computed else "decoding: products": max(read, computed)
        + DECODE_OVERLAP * min(read, computed),
        "decoding: keys and values": sequences * position * job.cache_bytes / devices / machines.memory,
        "decoding: other kernels": moved / machines.memory + work.layers * DECODE_LAYER_SECONDS,
    }
    if devices > 1:
        size = 2 * sequences * work.hidden
        parts[SUMS] = 2 * work.layers * (SUM_SECONDS + machines.sum_seconds(size, devices, 1))
    return parts


def transfer_seconds(
    work: ModelWork, machines: Machines, sharding: Sharding, *, receivers: int, engine: int = 1
) -> StepTime:
    """Return the time in which new weights reach the engines: gathered by the learners, then sent to other devices.

    `engine`: devices of one engine, each of which receives its part; a part is sent once, to all engines. Learners send
    buckets while they gather the next ones; across machines both pass the same ports.
    """
    size, ranks = work.element_size * work.parameters, sharding.devices // sharding.replicate
    if sharding.devices == 1 and not receivers:
        return StepTime()
    gathered = machines.gather_seconds(size, ranks, 1)
    if not receivers:
        return StepTime({TRANSFER: gathered})
    inside = sharding.devices + receivers <= machines.devices_per_machine
    port = LINK_SHARE * (machines.rates.link if inside else machines.rates.network)
    leaving = size / min(sharding.devices, MAX_GROUPS * engine) / port
    together = ranks > machines.devices_per_machine
    sent = gathered + leaving if together else max(gathered, leaving)
    return StepTime({TRANSFER: max(sent, size / engine / port)})
