"""The engine that needs no second copy of the weights: it runs the trainer's own weights, with a cache of ours.

Sequences live in slots. A finished one gives its slot to the next request; when none is left, the last slots move
into the gaps, so that a step computes the sequences under way and little else. Every random number comes from a
request's own seed and the token's place, so an answer does not depend on its company. On a GPU a step is one CUDA
graph and the host looks every few steps; on a CPU the same step runs as it is.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posttrain.core.host import host_memory
from posttrain.core.types import Sample
from posttrain.engines.base import BetweenSteps, GenerationRequest, OnCompletion, OnToken, Sampling
from posttrain.engines.decode_graphs import Graphs
from posttrain.engines.decoder import FusedDecoder
from posttrain.engines.kernels import reference
from posttrain.engines.kv_cache import SlotCache, bytes_per_position, decode_kernels_for
from posttrain.engines.scheduler import BatchScheduler, Hear
from posttrain.engines.slots import Slots
from posttrain.nn.forward import ModelRunner

MEMORY_SHARE = 0.8  # of the free memory of a GPU, for the cache
MORE_SLOTS, MORE_SHARE = 2048, 0.25  # a small model fills a GPU with so many; of its memory, for more than the usual
LOGIT_BYTES = 8  # in half precision, and in float32 where they are changed before a draw
KEEP_BLOCKS = 2**25 - 2**16
"""Bytes. Having freed such a block, glibc's malloc keeps smaller ones for reuse. Else it returns those of logits to the
system after every step, and gets them back page by page, which takes longer than filling them."""

WORTH_PACKING = (4, 256)  # answers, tokens of all of them: packing takes as long as a few steps
PACKING_SHARE = 1 / 16  # of the machine's memory, at most; not of what is free, so that equal runs compute equally

log = logging.getLogger("posttrain")


class LocalEngine:
    """Continuous batching over a Hugging Face module."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        slots: int | None = None,
        leave: Callable[[], int] = lambda: 0,
        frozen: bool = False,
    ) -> None:
        """`leave`: bytes of the device that others will want; `frozen`: there are none, and weights never change."""
        self.runner, self.tokenizer, self.leave, self.frozen = runner, tokenizer, leave, frozen
        self.device = next(runner.model.parameters()).device
        self.most = slots or default_slots(self.device)
        self.may_take_more = slots is None
        self.addresses: tuple[int, ...] = ()
        self.decoder: FusedDecoder | None = None
        self.room = (0, 0, 0)  # slots, positions of each, tokens of an answer: what the cache was made for
        self.cache: SlotCache | None = None
        self.slots: Slots | None = None
        self.graphs: Graphs | None = None
        self.logits: torch.Tensor | None = None  # [slots, V]: where a captured step leaves them, if it does not draw

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        sampling: Sampling,
        on_token: OnToken | None = None,
        between_steps: BetweenSteps | None = None,
        on_completion: OnCompletion | None = None,
    ) -> list[Sample]:
        """One sample a request, in order. Tokens, log-probabilities and mask cover prompt and answer."""
        if not requests:
            return []
        was_training = self.runner.model.training
        self.runner.model.eval()
        try:
            with torch.inference_mode():
                self.prepare(requests, sampling)
                hear = None if on_token is None else lambda answer: on_token(answer.index, answer.tokens[-1])
                ahead = self.graphs is not None and hear is None and between_steps is None
                session = BatchScheduler(self, hear, ahead=ahead)
                for request in requests:
                    session.submit(request, sampling)
                ended: dict[int, Sample] = {}

                def collect() -> None:
                    for index, sample in session.collect().items():
                        ended[index] = sample
                        if on_completion is not None:
                            on_completion(index, sample)

                packed: int | None = None  # version of the weights
                while session.busy:
                    if between_steps is not None:
                        session.version = between_steps()
                    if session.version != packed:
                        self.pack(len(requests), sampling.max_tokens)
                        packed = session.version
                    session.begin()
                    collect()  # what the last look has seen
                    session.look()
                collect()
                return [ended[index] for index in range(len(requests))]
        finally:
            self.runner.model.train(was_training)
            if self.device.type == "cpu" and not self.frozen:
                self.sleep()

    def session(self, longest: int, answer: int, hear: Hear) -> BatchScheduler:
        """Requests may come and go at any time, each with settings of its own, until the engine sleeps.

        `longest`: tokens of prompt and answer, `answer`: of the answer alone. All calls must come from one thread, in
        inference mode, and the model must not be training.
        """
        self.find_weights()
        on_gpu = self.device.type == "cuda"
        self.make_room(self.most, self.rounded(longest if on_gpu else min(longest, 256)), self.rounded(answer))
        assert self.slots is not None
        self.slots.begin(self.slots.answer, None)
        self.pack(self.most, answer)
        return BatchScheduler(self, hear, mixed=True)

    def sleep(self) -> None:
        """Give the memory of cache and packed weights back. The next call takes it again, and captures graphs again."""
        self.cache = self.slots = self.graphs = self.logits = None
        if self.decoder is not None:
            self.decoder.unpack()

    def pack(self, answers: int, tokens: int) -> None:
        """Pack the weights as they are now, if so many answers of so many tokens are worth it and memory is plenty."""
        if self.decoder is None or answers < WORTH_PACKING[0] or answers * tokens < WORTH_PACKING[1]:
            return
        if self.frozen and self.decoder.packed:
            return
        self.decoder.unpack()
        weights = list(self.runner.model.parameters())
        if can_pack(weights) and sum(weight.nbytes for weight in weights) < host_memory() * PACKING_SHARE:
            self.decoder.pack()

    def prepare(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> None:
        """Room for these requests. What is there is kept if it is large enough: graphs hold its addresses."""
        self.find_weights()
        longest = max(len(request.prompt) for request in requests) + sampling.max_tokens
        slots, *had = self.room if self.cache is not None else (0, 0, 0)  # so that short and long ones can take turns
        capacity, answer = map(max, had, (self.rounded(longest), self.rounded(sampling.max_tokens)))
        most = most_slots(self.device, self.bytes_per_slot(capacity)) if self.may_take_more else self.most
        self.make_room(min(most, max(slots, self.bucket(len(requests)))), capacity, answer)
        assert self.slots is not None
        self.slots.begin(
            sampling.max_tokens, self.runner.vocabulary_size if sampling.repetition_penalty != 1.0 else None
        )

    def make_room(self, count: int, capacity: int, answer: int) -> None:
        """So many slots with so many positions each, for answers of so many tokens."""
        wanted = (count, capacity, answer)
        if self.cache is None or any(more > had for more, had in zip(wanted, self.room, strict=True)):
            self.sleep()
            self.room = wanted
            count = self.affordable(count, capacity)
            if self.device.type == "cpu":
                torch.empty(KEEP_BLOCKS, dtype=torch.uint8)  # freed at once: see there
            self.cache = SlotCache(count, capacity, self.device)
            self.slots = Slots(count, answer, self.device)
            self.graphs = Graphs() if self.can_capture() else None

    def rounded(self, size: int) -> int:
        """Few sizes, so that the next call finds room."""
        step = 64 if self.device.type == "cpu" else 256
        return -(-size // step) * step

    def find_weights(self) -> None:
        """Look where the weights lie. An optimizer writes them in place; if they have moved, graphs are worthless."""
        model = self.runner.model
        addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        if addresses == self.addresses:
            return
        if FusedDecoder.supports(model):
            self.decoder = FusedDecoder(model, decode_kernels_for(self.device))
        else:
            self.decoder = None
        if not self.addresses and self.device.type == "cuda" and not self.can_capture():
            log.warning(f"{type(model).__name__} generates without CUDA graphs: the same answers, more slowly.")
        self.addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        self.sleep()

    def can_capture(self) -> bool:
        """Whether a step can become a graph: our own code and kernels on a GPU, and no weights to unpack on the way."""
        if self.device.type != "cuda" or self.decoder is None or decode_kernels_for(self.device) is reference:
            return False
        return not getattr(self.runner.model, "is_quantized", False)

    def affordable(self, count: int, capacity: int) -> int:
        """As many slots as memory has room for."""
        if self.device.type != "cuda":
            return count
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0] - self.leave()
        found = max(1, min(count, int(free * MEMORY_SHARE) // self.bytes_per_slot(capacity)))
        wanted = min(count, self.most)
        if found < wanted:
            log.warning(
                f"generation: memory has room for {found} sequences of {capacity:,} tokens at a time, not {wanted}."
            )
        return found

    def bytes_per_slot(self, capacity: int) -> int:
        """Keys, values and logits."""
        dtype = next(self.runner.model.parameters()).dtype
        return (
            capacity * bytes_per_position(self.runner.model.config, dtype) + LOGIT_BYTES * self.runner.vocabulary_size
        )

    def bucket(self, count: int) -> int:
        """How many slots a step computes for so many sequences: a graph serves one size, so there are few sizes."""
        return rung(count) if self.device.type == "cuda" else count


def default_slots(device: torch.device) -> int:
    """Sequences under way at a time, if nothing else is said."""
    return 512 if device.type == "cuda" else 64


def most_slots(device: torch.device, bytes_per_slot: int) -> int:
    """The same, where all requests are known when generation begins."""
    usual = default_slots(device)
    if device.type != "cuda":
        return usual
    cheap = int(torch.cuda.get_device_properties(device).total_memory * MORE_SHARE) // bytes_per_slot
    return max(usual, min(MORE_SLOTS, cheap))


def rung(count: int) -> int:
    """The next of 1, 8, 32, 64, 128, 192, 256, 384, 512, 768 ...; up to 64 a step costs what reading weights costs."""
    if count <= 64:
        return next(size for size in (1, 8, 32, 64) if count <= size)
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if size >= 256 and count <= size * 3 // 4 else size


def can_pack(weights: Sequence[torch.Tensor]) -> bool:
    """Whether there are products that like packed weights: in float32, on such a CPU."""
    on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return on_cpu and torch.backends.mkldnn.is_available() and platform.machine() in ("x86_64", "AMD64")
