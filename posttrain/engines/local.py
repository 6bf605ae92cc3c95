"""The engine that needs no second copy of the weights: it runs the trainer's own, with a KV cache of its own.

Sequences live in slots. A finished sequence frees its slot for the next request; when no request waits, the sequences
of the last slots move into gaps, so that a step computes the active sequences and little else. Every random number
depends on a request's seed and the token's index only, so a completion does not depend on the other requests of its
batch. On a GPU a decode step is one CUDA graph and the host checks every few steps; on a CPU the step runs eagerly.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.core.host import host_memory
from posttrain.core.types import Sample, WeightVersion
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, OnToken, Sampling
from posttrain.engines.decode_graphs import DecodeGraphs
from posttrain.engines.decoder import FusedDecoder
from posttrain.engines.executor import ModelExecutor, bucket_size
from posttrain.engines.kernels import reference
from posttrain.engines.kv_cache import KVCache, bytes_per_position, decode_kernels_for, round_length
from posttrain.engines.scheduler import ActiveRequest, BatchScheduler, OnNewToken
from posttrain.engines.slot_state import SlotState
from posttrain.nn.forward import ModelRunner

CACHE_SHARE = 0.8  # of the free memory of a GPU
# A small model keeps a GPU busy only with many sequences: up to so many slots, within this share of the GPU's memory.
SLOT_LIMIT, MORE_SLOTS_SHARE = 2048, 0.25
LOGIT_BYTES = 8  # half precision, and float32 where they are changed before sampling
KEEP_BLOCKS = 2**25 - 2**16
"""Bytes. After a block of this size is freed, glibc's malloc keeps smaller ones for reuse. Otherwise it returns the
memory of logits to the system after every step and gets it back page by page, which takes longer than filling it."""

WORTH_PACKING = (4, 256)  # requests, tokens of all of them: packing takes as long as a few steps
PACKING_SHARE = 1 / 16  # of host memory at most; not of free memory, so that equal runs compute equally

log = logging.getLogger("posttrain")


class LocalEngine:
    """Continuous batching over a Hugging Face model."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        slots: int | None = None,
        reserved_bytes: Callable[[], int] = lambda: 0,
        frozen: bool = False,
    ) -> None:
        """`reserved_bytes`: device memory that training will need; `frozen`: no training, weights never change."""
        self.runner, self.tokenizer, self.reserved_bytes, self.frozen = runner, tokenizer, reserved_bytes, frozen
        self.device = next(runner.model.parameters()).device
        self.max_slots = slots or default_slots(self.device)
        self.may_use_more_slots = slots is None
        self.weight_addresses: tuple[int, ...] = ()
        self.decoder: FusedDecoder | None = None
        self.executor: ModelExecutor | None = None
        self.allocated = (0, 0, 0)  # slots, positions per slot, tokens of a completion that the executor was made for

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """Generate one sample per request, in order. Tokens, log-probabilities and mask cover prompt and completion."""
        if not requests:
            return []
        was_training = self.runner.model.training
        self.runner.model.eval()
        try:
            with torch.inference_mode():
                return self.run(requests, sampling, on_token, between_steps, on_completion)
        finally:
            self.runner.model.train(was_training)
            if self.device.type == "cpu" and not self.frozen:
                self.sleep()

    def run(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        on_token: OnToken | None,
        between_steps: BetweenSteps | None,
        on_completion: OnCompletion | None,
    ) -> list[Sample]:
        """Schedule the requests until all are finished."""
        executor = self.prepare(requests, sampling)

        def report(active: ActiveRequest) -> None:
            assert on_token is not None
            on_token(active.index, active.tokens[-1])

        scheduler = BatchScheduler(
            executor,
            self.tokenizer,
            None if on_token is None else report,
            check_behind=executor.graphs is not None and on_token is None and between_steps is None,
        )
        for request in requests:
            scheduler.submit(request, sampling)
        samples: dict[int, Sample] = {}

        def collect() -> None:
            for index, sample in scheduler.collect().items():
                samples[index] = sample
                if on_completion is not None:
                    on_completion(index, sample)

        packed_version: WeightVersion | None = None
        while scheduler.busy:
            if between_steps is not None:
                scheduler.version = between_steps()
            if scheduler.version != packed_version:
                self.pack_weights(len(requests), sampling.max_tokens)
                packed_version = scheduler.version
            scheduler.start_step()
            collect()  # what the previous check found
            scheduler.check()
        collect()
        return [samples[index] for index in range(len(requests))]

    def open_scheduler(self, max_length: int, max_tokens: int, on_new_token: OnNewToken) -> BatchScheduler:
        """Open a scheduler that takes requests at any time, each with its own settings, until the engine sleeps.

        `max_length`: tokens of prompt and completion; `max_tokens`: of the completion alone. All calls must come from
        one thread, in inference mode, and the model must not be training.
        """
        self.find_weights()
        length = max_length if self.device.type == "cuda" else min(max_length, 256)
        sizes = round_length(length, self.device), round_length(max_tokens, self.device)
        executor = self.allocate(self.max_slots, *sizes)
        executor.slots.reset(executor.slots.max_tokens, None)
        self.pack_weights(self.max_slots, max_tokens)
        return BatchScheduler(executor, self.tokenizer, on_new_token, mixed=True)

    def sleep(self) -> None:
        """Free the cache and the packed weights. The next call allocates them and captures graphs again."""
        self.executor = None
        if self.decoder is not None:
            self.decoder.unpack()

    def pack_weights(self, requests: int, max_tokens: int) -> None:
        """Pack the current weights, if the requests are worth it and there is enough memory."""
        if self.decoder is None or requests < WORTH_PACKING[0] or requests * max_tokens < WORTH_PACKING[1]:
            return
        if self.frozen and self.decoder.packed:
            return
        self.decoder.unpack()
        weights = list(self.runner.model.parameters())
        if can_pack(weights) and sum(weight.nbytes for weight in weights) < host_memory() * PACKING_SHARE:
            self.decoder.pack()

    def prepare(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> ModelExecutor:
        """Return an executor for these requests; the existing one if it is large enough: graphs hold its addresses."""
        self.find_weights()
        longest = max(len(request.prompt) for request in requests) + sampling.max_tokens
        wanted = round_length(longest, self.device), round_length(sampling.max_tokens, self.device)
        slots, *existing = self.allocated if self.executor is not None else (0, 0, 0)  # short and long ones alternate
        capacity, max_tokens = map(max, existing, wanted)
        most = self.max_slots
        if self.may_use_more_slots:
            most = slots_for_known_requests(self.device, self.bytes_per_slot(capacity))
        size = bucket_size(len(requests)) if self.device.type == "cuda" else len(requests)
        executor = self.allocate(min(most, max(slots, size)), capacity, max_tokens)
        penalized = sampling.repetition_penalty != 1.0
        executor.slots.reset(sampling.max_tokens, self.runner.vocabulary_size if penalized else None)
        return executor

    def allocate(self, slots: int, capacity: int, max_tokens: int) -> ModelExecutor:
        """Return an executor with at least this many slots, positions per slot and tokens of a completion."""
        wanted = (slots, capacity, max_tokens)
        if self.executor is None or any(more > had for more, had in zip(wanted, self.allocated, strict=True)):
            self.sleep()
            self.allocated = wanted
            slots = self.affordable_slots(slots, capacity)
            if self.device.type == "cpu":
                torch.empty(KEEP_BLOCKS, dtype=torch.uint8)  # freed at once, see KEEP_BLOCKS
            self.executor = ModelExecutor(
                self.runner,
                self.decoder,
                KVCache(slots, capacity, self.device),
                SlotState(slots, max_tokens, self.device),
                DecodeGraphs() if self.can_capture() else None,
            )
        return self.executor

    def find_weights(self) -> None:
        """Check the addresses of the weights. Optimizers write in place; if weights have moved, graphs are invalid."""
        model = self.runner.model
        addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        if addresses == self.weight_addresses:
            return
        if FusedDecoder.supports(model):
            self.decoder = FusedDecoder(model, decode_kernels_for(self.device))
        else:
            self.decoder = None
        if not self.weight_addresses and self.device.type == "cuda" and not self.can_capture():
            log.warning(f"{type(model).__name__} generates without CUDA graphs: the same completions, more slowly.")
        self.weight_addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        self.sleep()

    def can_capture(self) -> bool:
        """Whether a decode step can be captured: our own code and kernels on a GPU, and no quantized weights."""
        if self.device.type != "cuda" or self.decoder is None or decode_kernels_for(self.device) is reference:
            return False
        return not getattr(self.runner.model, "is_quantized", False)

    def affordable_slots(self, slots: int, capacity: int) -> int:
        """Reduce the number of slots to what fits into device memory."""
        if self.device.type != "cuda":
            return slots
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] - self.reserved_bytes()
        affordable = max(1, min(slots, int(free * CACHE_SHARE) // self.bytes_per_slot(capacity)))
        wanted = min(slots, self.max_slots)
        if affordable < wanted:
            log.warning(
                f"generation: device memory holds {affordable} sequences of {capacity:,} tokens at a time, "
                f"instead of {wanted}."
            )
        return affordable

    def bytes_per_slot(self, capacity: int) -> int:
        """Memory of keys, values and logits."""
        dtype = next(self.runner.model.parameters()).dtype
        positions = capacity * bytes_per_position(self.runner.model.config, dtype)
        return positions + LOGIT_BYTES * self.runner.vocabulary_size


def default_slots(device: torch.device) -> int:
    """Sequences that are active at a time, by default."""
    return 512 if device.type == "cuda" else 64


def slots_for_known_requests(device: torch.device, bytes_per_slot: int) -> int:
    """Slots where all requests are known at the start: more than the default, if they need little memory."""
    default = default_slots(device)
    if device.type != "cuda":
        return default
    cheap = int(torch.cuda.get_device_properties(device).total_memory * MORE_SLOTS_SHARE) // bytes_per_slot
    return max(default, min(SLOT_LIMIT, cheap))


def can_pack(weights: Sequence[torch.Tensor]) -> bool:
    """Whether oneDNN has faster products with packed weights: float32 on an x86 CPU."""
    on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return on_cpu and torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
