"""The local engine: generates with the trainer's own weights, without a second copy, and with a KV cache of its own.

Sequences live in slots, and their keys and values in blocks of a paged cache, which are allocated as they grow: memory
is needed for the tokens that exist, not for the longest completion that is allowed. The completions of a group share
the blocks of their prompt. If blocks run out, the newest sequences wait and are computed again later. A finished
sequence frees its slot and blocks for the next request; when no request waits, the sequences of the last slots move
into gaps, so that a step computes the active sequences and little else. Every random number depends on a request's seed
and the token's index only, so a completion does not depend on the other requests of its batch. On a GPU a decode step
is one CUDA graph and the host checks every few steps; on a CPU the step runs eagerly.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from posttrain.config.sections import SPECULATIVE_MAX_SEQUENCES
from posttrain.core.errors import UsageError
from posttrain.core.host import host_memory
from posttrain.core.types import Sample, WeightVersion
from posttrain.engines.adapter_set import AdapterSet
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, OnToken, Sampling
from posttrain.engines.decode_graphs import DecodeGraphs
from posttrain.engines.decoder import FusedDecoder
from posttrain.engines.drafts import Drafter
from posttrain.engines.executor import ModelExecutor, bucket_size
from posttrain.engines.kernels import reference
from posttrain.engines.kv_cache import BLOCK_SIZE, KVCache, bytes_per_position, decode_kernels_for, round_length
from posttrain.engines.own_code import OwnCodeGenerator
from posttrain.engines.scheduler import ActiveRequest, BatchScheduler, OnNewToken
from posttrain.engines.slot_state import SlotState
from posttrain.nn.forward import ModelRunner
from posttrain.nn.products import has_fp8
from posttrain.nn.routing import routers_of

CACHE_SHARE = 0.8  # of the free memory of a GPU
FROZEN_CAPACITY = 4096  # positions of a slot on a CPU, at least, where the cache is kept for later calls
HOST_CACHE_SHARE = 0.5  # of host memory; not of free memory, so that equal runs compute equally
# A small model keeps a GPU busy only with many sequences: at most this many slots, in this share of the GPU's memory.
SLOT_LIMIT, MORE_SLOTS_SHARE = 2048, 0.25
LOGIT_BYTES = 8  # half precision, and float32 where they are changed before sampling
MALLOC_THRESHOLD_BYTES = 2**25 - 2**16
"""After a block of this size is freed, glibc's malloc keeps smaller ones for reuse. Otherwise it returns the memory of
logits to the system after every step and gets it back page by page, which takes longer than filling it."""

# Packing the weights for oneDNN takes as long as a few decode steps, so it needs this many requests and tokens.
MIN_PACKED_REQUESTS, MIN_PACKED_TOKENS = 4, 256
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
        record_experts: bool = False,
        cache_blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        quantization: str = "none",
        kv_cache_dtype: str = "auto",
        speculative_tokens: int = 0,
        speculative_max_sequences: int = SPECULATIVE_MAX_SEQUENCES,
    ) -> None:
        """`reserved_bytes`: device memory that training will need; `frozen`: no training, weights never change.

        `record_experts`: samples of a mixture of experts name the experts of each token.
        `quantization`: fp8 computes the layers with 8-bit copies of the current weights.
        `kv_cache_dtype`: fp8 stores keys and values as 8-bit floats.
        `cache_blocks`: blocks of the KV cache, each of `block_size` tokens; by default as many as memory allows.
        `speculative_tokens`: most drafted tokens of a sequence and step, with at most `speculative_max_sequences`
        active; 0: no drafts. Completions are the same up to rounding.
        """
        self.runner, self.tokenizer, self.reserved_bytes, self.frozen = runner, tokenizer, reserved_bytes, frozen
        self.own_code = None if runner.packed else OwnCodeGenerator(runner, tokenizer)
        if self.own_code is not None and speculative_tokens:
            raise UsageError(
                f"speculative_tokens is {speculative_tokens}, but {type(runner.model).__name__} generates by its own "
                "code, one token at a time. Leave it out."
            )
        self.device = next(runner.model.parameters()).device
        self.rounded_cache = kv_cache_dtype == "fp8"
        if self.rounded_cache:
            self.check_rounded_cache()
        self.routers = routers_of(runner.model) if record_experts else []
        self.max_slots = slots or default_slots(self.device)
        self.may_use_more_slots = slots is None
        self.weight_addresses: tuple[int, ...] = ()
        self.decoder: FusedDecoder | None = None
        self.adapters: AdapterSet | None = None
        self.executor: ModelExecutor | None = None
        self.cache_blocks, self.block_size, self.quantization = cache_blocks, block_size, quantization
        self.drafter = Drafter(speculative_tokens, speculative_max_sequences) if speculative_tokens else None
        # Whether completions of earlier calls, so of earlier epochs, are drafts. Not on a CPU, where equal runs compute
        # equally, and not with frozen weights: a file of completions is the same if its generation was resumed.
        self.keeps_completions = self.device.type == "cuda" and not frozen
        self.preemptions = 0  # of sequences, because the KV cache was full
        self.weight_changes = 0  # that were reported
        self.cached_weights: tuple[int, ...] = ()  # identifies the weights that computed what the cache holds
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
        try:
            with self.generating():
                if self.own_code is not None:
                    return self.own_code.generate(requests, sampling, on_token, between_steps, on_completion)
                return self.run(requests, sampling, on_token, between_steps, on_completion)
        finally:
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
        longest = max(len(request.prompt) for request in requests)
        stream = RequestStream(self, longest, len(requests), sampling, on_token, between_steps)
        stream.add(requests)
        samples: dict[int, Sample] = {}
        while stream.busy:
            for index, sample in stream.step().items():
                samples[index] = sample
                if on_completion is not None:
                    on_completion(index, sample)
        return [samples[index] for index in range(len(requests))]

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Set the model to evaluation, without gradients, for as long as it generates."""
        was_training = self.runner.model.training
        self.runner.model.eval()
        try:
            with torch.inference_mode() if self.own_code is None else torch.no_grad():
                yield
        finally:
            self.runner.model.train(was_training)

    def open_scheduler(
        self, max_length: int, max_tokens: int, on_new_token: OnNewToken, slots: int | None = None
    ) -> BatchScheduler:
        """Open a scheduler that takes requests at any time, each with its own settings, until the engine sleeps.

        `max_length`: tokens of prompt and completion; `max_tokens`: of the completion alone; `slots`: requests that run
        at a time. All calls must come from one thread, in inference mode, and the model must not be training.
        """
        if self.own_code is not None:
            raise UsageError(
                f"{type(self.runner.model).__name__} generates by its own code, which takes no requests while others "
                "run. Use posttrain generate or posttrain chat, or serve it with vLLM."
            )
        self.check_weight_addresses()
        sizes = round_length(max_length, self.device), round_length(max_tokens, self.device)
        executor = self.allocate(slots or self.max_slots, *sizes)
        executor.reset(executor.slots.max_tokens, None)
        self.pack_weights(slots or self.max_slots, max_tokens)
        # Otherwise equal CPU runs compute equally: nothing depends on which requests came before.
        reuse = self.frozen or self.device.type == "cuda"
        how: dict[str, Any] = {"reuse_prefixes": reuse, "drafter": self.drafter if reuse else None}
        return BatchScheduler(executor, self.tokenizer, on_new_token, mixed=True, **how)

    def use_adapters(self, folders: Mapping[str, Path]) -> None:
        """Load adapters of the model, by name; requests choose one with `adapter`. They are frozen."""
        assert self.frozen and self.adapters is None, "adapters beside each other are for inference, and loaded once"
        if self.own_code is not None:
            raise UsageError(f"{type(self.runner.model).__name__} generates by its own code, without adapters")
        self.adapters = AdapterSet(self.runner.model, folders)
        self.weight_addresses = ()  # the decoder is made again, with them

    def weights_changed(self) -> None:
        """Drop, before the next call, keys and values that were kept for later requests."""
        self.weight_changes += 1

    def sleep(self) -> None:
        """Free the cache and the packed weights. The next call allocates them and captures graphs again."""
        self.executor = None
        if self.decoder is not None:
            self.decoder.unpack()

    def pack_weights(self, requests: int, max_tokens: int) -> None:
        """Quantize the current weights, or copy them into oneDNN's layout if that is worth it and memory is enough."""
        if self.quantization == "fp8":
            self.quantize_weights()
            return
        if self.decoder is None or requests < MIN_PACKED_REQUESTS or requests * max_tokens < MIN_PACKED_TOKENS:
            return
        if self.frozen and self.decoder.packed:
            return
        self.decoder.unpack()
        weights = list(self.runner.model.parameters())
        if can_pack(weights) and sum(weight.nbytes for weight in weights) < host_memory() * PACKING_SHARE:
            self.decoder.pack()

    def quantize_weights(self) -> None:
        """Make 8-bit copies of the current weights; raise UsageError if the engine cannot compute with them."""
        name = type(self.runner.model).__name__
        if self.decoder is None:
            raise UsageError(f"{name} generates by its own code, which has no fp8: leave rollout.quantization out.")
        if self.device.type == "cuda" and next(self.runner.model.parameters()).dtype != torch.bfloat16:
            raise UsageError("rollout.quantization fp8 needs a model in bfloat16: set --model.dtype bfloat16.")
        if not has_fp8(self.device):
            raise UsageError("rollout.quantization fp8 needs a GPU with fp8 (compute capability 8.9 or newer).")
        if not (self.frozen and self.decoder.quantized):
            self.decoder.quantize()
        if not self.decoder.quantized:
            raise UsageError(
                f"rollout.quantization fp8: no layer of {name} can be computed in 8 bits: sizes must be multiples of "
                "16, and layers with adapters need a GPU."
            )

    def check_rounded_cache(self) -> None:
        """Raise UsageError if the KV cache cannot hold 8-bit floats."""
        name = type(self.runner.model).__name__
        if self.own_code is not None:
            raise UsageError(f"kv_cache_dtype fp8: {name} generates with its own cache. Leave it out.")
        if getattr(self.runner.model.config, "kv_lora_rank", None):
            raise UsageError(f"kv_cache_dtype fp8: the cache of {name} holds latents, which stay exact. Leave it out.")
        if not has_fp8(self.device):
            raise UsageError("kv_cache_dtype fp8 needs a GPU with fp8 (compute capability 8.9 or newer).")

    def prepare(self, longest_prompt: int, count: int, sampling: Sampling) -> ModelExecutor:
        """Return an executor for `count` requests at a time; the existing one if that is large enough.

        Graphs hold its addresses.
        """
        self.check_weight_addresses()
        longest = longest_prompt + sampling.max_tokens
        wanted = round_length(longest, self.device), round_length(sampling.max_tokens, self.device)
        # Calls of different sizes alternate: a cache that is large enough for all of them is kept.
        slots, *existing = self.allocated if self.executor is not None else (0, 0, 0)
        capacity, max_tokens = map(max, existing, wanted)
        if self.frozen and self.device.type == "cpu":  # costs no memory, and the next, longer prompt finds this cache
            capacity = max(FROZEN_CAPACITY, 1 << (capacity - 1).bit_length())
        most = self.max_slots
        if self.may_use_more_slots:
            most = slots_for_known_requests(self.device, self.bytes_per_slot(capacity))
        size = bucket_size(count) if self.device.type == "cuda" else count
        executor = self.allocate(min(most, max(slots, size)), capacity, max_tokens)
        penalized = sampling.repetition_penalty != 1.0
        executor.reset(sampling.max_tokens, self.runner.vocabulary_size if penalized else None)
        return executor

    def allocate(self, slots: int, capacity: int, max_tokens: int) -> ModelExecutor:
        """Return an executor with at least this many slots, positions per slot and tokens of a completion."""
        wanted = (slots, capacity, max_tokens)
        if self.executor is None or any(more > had for more, had in zip(wanted, self.allocated, strict=True)):
            self.sleep()
            self.allocated = wanted
            if self.device.type == "cpu":
                torch.empty(MALLOC_THRESHOLD_BYTES, dtype=torch.uint8)  # freed at once
            blocks = self.blocks_for(slots, capacity)
            cache = KVCache(slots, capacity, self.device, blocks, self.block_size, rounded=self.rounded_cache)
            if self.routers:
                cache.record_experts(len(self.routers), self.routers[0].top_k)
            self.executor = ModelExecutor(
                self.runner,
                self.decoder,
                cache,
                SlotState(slots, max_tokens, self.device, 0 if self.drafter is None else self.drafter.tokens),
                DecodeGraphs() if self.can_capture() else None,
                self.adapters,
                self.draft_rows(slots),
            )
        # In-place operations count versions of a tensor, except through `.data`; those are reported.
        weights = (self.weight_changes, *(parameter._version for parameter in self.runner.model.parameters()))
        if weights != self.cached_weights:
            self.executor.cache.pool.forget()
            self.cached_weights = weights
        return self.executor

    def check_weight_addresses(self) -> None:
        """Rebuild the decoder and drop captured graphs if weights have moved; optimizers write them in place."""
        model = self.runner.model
        addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        if addresses == self.weight_addresses:
            return
        if FusedDecoder.supports(model):
            self.decoder = FusedDecoder(model, decode_kernels_for(self.device), self.adapters)
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
        return self.decoder.can_capture and not getattr(self.runner.model, "is_quantized", False)

    def blocks_for(self, slots: int, capacity: int) -> int:
        """Return how many blocks the KV cache has: what the slots could need, or what fits into memory."""
        if self.cache_blocks is not None:
            return self.cache_blocks
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            memory = int((torch.cuda.mem_get_info(self.device)[0] - self.reserved_bytes()) * CACHE_SHARE)
            memory -= max(slots, self.draft_rows(slots)) * LOGIT_BYTES * self.runner.vocabulary_size
        else:  # memory is used when it is written
            memory = int(host_memory() * HOST_CACHE_SHARE)
        affordable = memory // (self.block_size * self.bytes_per_position)
        return max(1, min(slots * -(-capacity // self.block_size), affordable))

    def draft_rows(self, slots: int) -> int:
        """Return how many rows a step with drafts has at most."""
        if self.drafter is None:
            return 0
        return bucket_size(min(slots, self.drafter.max_sequences)) * (1 + self.drafter.tokens)

    def bytes_per_slot(self, capacity: int) -> int:
        """Return the memory of a slot with this many positions: of keys, values and logits."""
        return capacity * self.bytes_per_position + LOGIT_BYTES * self.runner.vocabulary_size

    @property
    def bytes_per_position(self) -> int:
        dtype = next(self.runner.model.parameters()).dtype
        config, latents = self.runner.model.config, self.decoder is not None
        return bytes_per_position(config, dtype, latents=latents, rounded=self.rounded_cache)


class RequestStream:
    """Requests of one engine, to which others are added while they are generated."""

    def __init__(
        self,
        engine: LocalEngine,
        longest_prompt: int,
        count: int,
        sampling: Sampling,
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
    ) -> None:
        """`longest_prompt`: tokens of the longest one that will be added; `count`: requests at a time."""
        executor = engine.prepare(longest_prompt, count, sampling)
        self.engine, self.count, self.sampling, self.between_steps = engine, count, sampling, between_steps

        def report(active: ActiveRequest) -> None:
            assert on_token is not None
            on_token(active.index, active.tokens[-1])

        self.scheduler = BatchScheduler(
            executor,
            engine.tokenizer,
            None if on_token is None else report,
            check_behind=executor.graphs is not None and on_token is None and between_steps is None,
            reuse_prefixes=engine.frozen or engine.device.type == "cuda",  # equal CPU runs compute equally
            drafter=engine.drafter,
        )
        self.packed_version: WeightVersion | None = None
        if engine.drafter is not None and not engine.keeps_completions:
            engine.drafter.forget()

    @property
    def busy(self) -> bool:
        return self.scheduler.busy or bool(self.scheduler.finished)

    @property
    def in_progress(self) -> int:
        """Requests that wait or run."""
        return len(self.scheduler.admitted) + len(self.scheduler.waiting)

    @property
    def room(self) -> int:
        """How many requests could be added without waiting."""
        return max(0, self.scheduler.cache.slots - self.in_progress)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Add requests; they are numbered in this order, from 0."""
        for request in requests:
            self.scheduler.submit(request, self.sampling)

    def step(self) -> dict[int, Sample]:
        """Generate a few tokens of each sequence; returns the samples of finished requests, by number."""
        scheduler, engine = self.scheduler, self.engine
        if not scheduler.busy:
            return scheduler.collect()
        before = scheduler.preemptions
        if self.between_steps is not None:
            scheduler.version = self.between_steps()
        if scheduler.version != self.packed_version:
            engine.pack_weights(self.count, self.sampling.max_tokens)
            if self.packed_version is not None:
                scheduler.cache.pool.forget()
            self.packed_version = scheduler.version
        scheduler.start_step()
        samples = scheduler.collect()  # what the previous check found
        scheduler.check()
        engine.preemptions += scheduler.preemptions - before
        return samples


def default_slots(device: torch.device) -> int:
    """Return how many sequences are active at a time by default."""
    return 512 if device.type == "cuda" else 64


def slots_for_known_requests(device: torch.device, bytes_per_slot: int) -> int:
    """Return how many slots to use if all requests are known: above the default if they need little memory."""
    default = default_slots(device)
    if device.type != "cuda":
        return default
    cheap = int(torch.cuda.get_device_properties(device).total_memory * MORE_SLOTS_SHARE) // bytes_per_slot
    return max(default, min(SLOT_LIMIT, cheap))


def can_pack(weights: Sequence[torch.Tensor]) -> bool:
    """Whether oneDNN has faster products with packed weights: float32 on an x86 CPU."""
    on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return on_cpu and torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
