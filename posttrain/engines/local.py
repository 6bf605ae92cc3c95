"""The engine that needs no second copy of the weights: it runs the trainer's own weights, with a cache of ours.

Sequences live in slots. A finished one gives its slot to the next request; when none is left, the last slots move
into the gaps, so that a step computes the sequences under way and little else. Every random number comes from a
request's own seed and the token's place, so an answer does not depend on its company. On a GPU a step is one CUDA
graph and the host looks every few steps; on a CPU the same step runs as it is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from posttrain import ops
from posttrain.data.pack import collate
from posttrain.engines import plain
from posttrain.engines.base import OnToken, Request, Sampling
from posttrain.engines.cache import SlotCache, bytes_per_position, steps_for
from posttrain.engines.fused import FusedDecoder
from posttrain.engines.graph import Graphs
from posttrain.engines.slots import Slots
from posttrain.models import attention
from posttrain.models.forward import Trunk
from posttrain.types import Floats, Ints, Sample

LOOK_EVERY = 8  # steps of a graph between two looks of the host
MEMORY_SHARE = 0.8  # of the free memory of a GPU, for the cache
log = logging.getLogger("posttrain")


@dataclass(slots=True)
class Answer:
    """A request under way."""

    index: int  # among the requests
    request: Request
    place: int = 0  # tokens so far, as of the last look
    tokens: list[int] = field(default_factory=list)  # only where somebody reads along


class LocalEngine:
    """Continuous batching over a Hugging Face module."""

    def __init__(self, trunk: Trunk, tokenizer: Any, *, slots: int | None = None) -> None:
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.device = next(trunk.model.parameters()).device
        self.most = slots or (512 if self.device.type == "cuda" else 64)
        self.addresses: tuple[int, ...] = ()
        self.decoder: FusedDecoder | None = None
        self.room = (0, 0, 0)  # slots, positions of each, tokens of an answer: what the cache was made for
        self.cache: SlotCache | None = None
        self.slots: Slots | None = None
        self.graphs: Graphs | None = None

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Sample]:
        """One sample a request, in order. Tokens, log-probabilities and mask cover prompt and answer."""
        if not requests:
            return []
        was_training = self.trunk.model.training
        self.trunk.model.eval()
        try:
            with torch.inference_mode():
                self.prepare(requests, sampling)
                return Run(self, requests, sampling, on_token).all()
        finally:
            self.trunk.model.train(was_training)
            if self.device.type == "cpu":
                self.sleep()

    def sleep(self) -> None:
        """Give the cache's memory back. The next call takes it again, and captures its graphs again."""
        self.cache = self.slots = self.graphs = None

    def prepare(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Room for these requests. What is there is kept if it is large enough: graphs hold its addresses."""
        self.find_weights()
        step = 64 if self.device.type == "cpu" else 256
        longest = max(len(request.prompt) for request in requests) + sampling.max_tokens
        capacity, answer = (-(-size // step) * step for size in (longest, sampling.max_tokens))
        wanted = (min(self.most, self.bucket(len(requests))), capacity, answer)
        if self.cache is None or any(more > had for more, had in zip(wanted, self.room, strict=True)):
            self.sleep()
            self.room = wanted
            count = self.affordable(wanted[0], capacity)
            self.cache = SlotCache(count, capacity, self.device)
            self.slots = Slots(count, answer, self.device)
            self.graphs = Graphs() if self.can_capture() else None
        assert self.slots is not None
        self.slots.begin(sampling.max_tokens, self.trunk.vocabulary if sampling.repetition_penalty != 1.0 else None)

    def find_weights(self) -> None:
        """Look where the weights lie. An optimizer writes them in place; if they have moved, graphs are worthless."""
        model = self.trunk.model
        addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        if addresses == self.addresses:
            return
        if FusedDecoder.knows(model):
            self.decoder = FusedDecoder(model, steps_for(self.device))
        else:
            self.decoder = None
        if not self.addresses and self.device.type == "cuda" and not self.can_capture():
            log.warning(f"{type(model).__name__} generates without CUDA graphs: the same answers, more slowly.")
        self.addresses = tuple(parameter.data_ptr() for parameter in model.parameters())
        self.sleep()

    def can_capture(self) -> bool:
        """Whether a step can become a graph: our own code and kernels on a GPU, and no weights to unpack on the way."""
        if self.device.type != "cuda" or self.decoder is None or steps_for(self.device) is plain:
            return False
        return not getattr(self.trunk.model, "is_quantized", False)

    def affordable(self, count: int, capacity: int) -> int:
        """As many slots as memory has room for."""
        if self.device.type != "cuda":
            return count
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        a_slot = capacity * bytes_per_position(self.trunk.model.config, next(self.trunk.model.parameters()).dtype)
        return max(1, min(count, int(free * MEMORY_SHARE) // a_slot))

    def bucket(self, count: int) -> int:
        """How many slots a step computes for so many sequences: a graph serves one size, so there are few sizes."""
        return rung(count) if self.device.type == "cuda" else count


def rung(count: int) -> int:
    """The next of 1, 8, 32, 64, 128, 192, 256, 384, 512, 768 ...; up to 64 a step costs what reading weights costs."""
    if count <= 64:
        return next(size for size in (1, 8, 32, 64) if count <= size)
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if size >= 256 and count <= size * 3 // 4 else size


class Run:
    """One call of `generate`."""

    def __init__(
        self, engine: LocalEngine, requests: Sequence[Request], sampling: Sampling, on_token: OnToken | None
    ) -> None:
        assert engine.cache is not None and engine.slots is not None
        self.engine, self.sampling, self.on_token = engine, sampling, on_token
        self.trunk, self.cache, self.slots, self.device = engine.trunk, engine.cache, engine.slots, engine.device
        self.stops = self.slots.stops_of(sampling.stop_ids)
        self.distribution = replace(sampling, max_tokens=0, stop_texts=())  # what a captured step depends on
        self.draw = steps_for(self.device).draw
        self.waiting = deque(Answer(index, request) for index, request in enumerate(requests))
        self.live: dict[int, Answer] = {}  # by slot
        self.ended: dict[int, Sample] = {}
        self.watched = on_token is not None or bool(sampling.stop_texts)
        on_gpu = engine.graphs is not None
        self.patience = LOOK_EVERY if on_gpu and not self.watched else 1
        self.worth_a_prefill = max(1, self.cache.slots // 4) if on_gpu else 1  # launching one costs several steps
        self.prefill_tokens = 32768 if self.device.type == "cuda" else 8192

    def all(self) -> list[Sample]:
        """Until every request has its answer."""
        while self.waiting or self.live:
            free = self.cache.slots - len(self.live)
            if self.waiting and free >= min(self.worth_a_prefill, len(self.waiting)):
                self.admit()
            else:
                self.advance()
            self.look()
            self.close_gaps()
        return [self.ended[index] for index in range(len(self.ended))]

    def admit(self) -> None:
        """Move requests into free slots and run their prompts, each different prompt of neighbours once."""
        free = deque(slot for slot in range(self.cache.slots) if slot not in self.live)
        prompts: list[Sample] = []
        sharing: list[list[int]] = []  # slots of each prompt
        newcomers: dict[int, Answer] = {}
        room = self.prefill_tokens
        while self.waiting and free:
            prompt = self.waiting[0].request.prompt
            if not prompts or not np.array_equal(prompts[-1].tokens, prompt):
                if prompts and len(prompt) > room:
                    break
                room -= len(prompt)
                prompts.append(Sample(tokens=prompt, mask=np.zeros(len(prompt), dtype=np.bool_)))
                sharing.append([])
            sharing[-1].append(free[0])
            newcomers[free.popleft()] = self.waiting.popleft()
        batch = collate(prompts, self.device)
        self.cache.begin_prefill(batch.lengths, sharing)
        if self.engine.decoder is not None:
            packing = attention.layout(batch, ragged_kernel=self.trunk.ragged_kernel)
            hidden = self.engine.decoder.prefill(batch, packing, self.cache)
        else:
            hidden = self.trunk.hidden(batch, cache=self.cache).last_hidden_state[0]
        hidden = hidden[batch.starts[1:].long() - 1]
        asked = [answer.request for answer in newcomers.values()]
        rows = self.slots.admit(list(newcomers), [r.prompt.tolist() for r in asked], [r.seed for r in asked])
        repeats = torch.tensor([len(slots) for slots in sharing], device=self.device)
        self.choose(rows, hidden.repeat_interleave(repeats, 0, output_size=len(rows)))
        self.live |= newcomers

    def advance(self) -> None:
        """A few steps: as many as nobody can end before, and no more than the host likes to wait."""
        count = self.engine.bucket(max(self.live) + 1)
        left = self.sampling.max_tokens - max(answer.place for answer in self.live.values())
        longest = max(len(answer.request.prompt) + answer.place for answer in self.live.values())
        for ahead in range(min(self.patience, left)):
            if self.engine.graphs is None:
                self.step(count, longest + ahead)
            else:
                self.engine.graphs.run((count, self.distribution), lambda: self.step(count, self.cache.capacity))

    def step(self, count: int, longest: int) -> None:
        """Run the newest token of the first slots and draw the next. All on the device, so that it can be captured."""
        positions = self.slots.positions(count)
        self.cache.begin_step(positions, longest)
        tokens = self.slots.token[:count]
        if self.engine.decoder is not None:
            hidden = self.engine.decoder.decode(tokens, positions, self.cache)
        else:
            layers = getattr(self.trunk.model, self.trunk.model.base_model_prefix)
            out = layers(input_ids=tokens[None], position_ids=positions[None], use_cache=False, cache=self.cache)
            hidden = out.last_hidden_state[0]
        self.choose(self.slots.index[:count], hidden)

    def choose(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """Draw the next token of each row and note it with its log-probability."""
        sampling, slots = self.sampling, self.slots
        logits = self.trunk.logits(hidden) if self.engine.decoder is None else self.engine.decoder.logits(hidden)
        if slots.noting:
            assert slots.seen is not None
            penalty = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
            logits = torch.where(slots.seen[rows], logits * penalty, logits)
        if sampling.temperature == 0.0:
            logits = ops.tempered(logits.float(), 1.0, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens = logits.argmax(-1)
            logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        else:
            least, temperature = None, sampling.temperature
            if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p:
                logits, temperature = logits.float() / temperature, 1.0
                least = ops.least_kept(logits, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens, logprobs = self.draw(logits, temperature, least, slots.seed[rows], slots.place[rows])
        slots.record(rows, tokens, logprobs, self.stops)

    def look(self) -> None:
        """See who has ended."""
        looked = self.slots.look(max(self.live) + 1)
        over: dict[int, bool] = {}  # slot: whether a stop text ended it
        for slot, answer in self.live.items():
            done, place, token = looked[slot]
            if place == answer.place:  # others were let in, this one did not move
                continue
            answer.place = place
            if self.watched:
                answer.tokens.append(token)
            said = self.says_stop(answer)
            if done or said:
                over[slot] = said
            if self.on_token is not None:
                self.on_token(answer.index, token)
        if not over:
            return
        rows = torch.tensor(list(over), device=self.device)
        self.slots.done[rows] = True
        width = max(self.live[slot].place for slot in over)
        tokens = self.slots.answers[rows, :width].cpu().numpy().astype(np.int32)
        logprobs = self.slots.logprobs[rows, :width].cpu().numpy()
        for row, (slot, said) in enumerate(over.items()):
            answer = self.live.pop(slot)
            chosen, chances = tokens[row, : answer.place], logprobs[row, : answer.place]
            finish = "stop" if said or int(chosen[-1]) in self.sampling.stop_ids else "length"
            self.ended[answer.index] = finished(answer.request, chosen, chances, finish)

    def says_stop(self, answer: Answer) -> bool:
        """Whether a stop text is complete with the newest token."""
        if not self.sampling.stop_texts:
            return False
        longest = max(len(text) for text in self.sampling.stop_texts)
        tail = self.engine.tokenizer.decode(answer.tokens[-(longest + 8) :])  # most tokens are longer than a character
        return any(text in tail for text in self.sampling.stop_texts)

    def close_gaps(self) -> None:
        """When fewer slots would do, the sequences in the last ones move to the front."""
        size = self.engine.bucket(len(self.live)) if self.live else 0
        late = sorted(slot for slot in self.live if slot >= size)
        if not late or self.engine.bucket(late[-1] + 1) == size:
            return
        gaps = [slot for slot in range(size) if slot not in self.live][: len(late)]
        sources, targets = (torch.tensor(slots, device=self.device) for slots in (late, gaps))
        self.cache.move(sources, targets)
        self.slots.move(sources, targets)
        for source, target in zip(late, gaps, strict=True):
            self.live[target] = self.live.pop(source)


def finished(request: Request, tokens: Ints, logprobs: Floats, finish: str) -> Sample:
    prompt = request.prompt
    return Sample(
        tokens=np.concatenate([prompt, tokens]),
        mask=np.arange(len(prompt) + len(tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
        group=request.group,
        finish=finish,
    )
