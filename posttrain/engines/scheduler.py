"""Requests under way in the local engine: who has a slot, what is drawn next, who has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from posttrain.core import ops
from posttrain.core.devices import copy_to_device
from posttrain.core.types import Floats, Ints, Sample
from posttrain.data.packing import collate
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.kv_cache import decode_kernels_for
from posttrain.nn import attention

if TYPE_CHECKING:
    from posttrain.engines.local import LocalEngine

LOOK_EVERY = 8  # steps of a graph between two looks of the host
NOWHERE = -1  # the slot of an answer that waits, or has ended
MOST_KINDS = 256  # ways to draw, and sets of stop texts, that are remembered


@dataclass(slots=True)
class ActiveRequest:
    """A request under way."""

    index: int  # among the requests
    request: GenerationRequest
    sampling: Sampling
    kind: Kind
    slot: int = NOWHERE
    ends: int = 0  # the session's count of tokens when it has as many as it may have
    place: int = 0  # tokens so far, as of the last look; where nobody reads them, only once it has ended
    version: int = 0  # of the weights that drew its first token
    tokens: list[int] = field(default_factory=list)  # only where somebody reads them, be it for stop texts
    logprobs: list[float] = field(default_factory=list)  # only for a user
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # of each place, where the request asks for some

    @property
    def longest(self) -> int:
        """With its prompt, in the end."""
        return len(self.request.prompt) + self.sampling.max_tokens


@dataclass(slots=True)
class Fetched:
    """Tensors on their way from the device."""

    tensors: list[torch.Tensor]
    there: torch.cuda.Event | None = None

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> Fetched:
        """The device goes on with what it is told next, and may overwrite them."""
        on_cuda = tensors[0].is_cuda
        found = cls([tensor.to("cpu", non_blocking=on_cuda) for tensor in tensors])
        if on_cuda:
            found.there = torch.cuda.Event()
            found.there.record()
        return found

    def wait(self) -> list[torch.Tensor]:
        if self.there is not None:
            self.there.synchronize()
        return self.tensors


@dataclass(slots=True)
class Seen:
    """How far everybody is, after some step."""

    live: dict[int, ActiveRequest]  # by the slots of then
    state: Fetched  # see Slots.state
    version: int  # of the weights that drew the newest tokens


@dataclass(slots=True)
class Leaving:
    """Answers that have ended."""

    answers: list[ActiveRequest]
    stopped: list[bool]  # by a text
    drawn: Fetched  # tokens and log-probabilities [answers, length of the longest]
    newest: int  # version of the weights that drew the last tokens


@dataclass(slots=True, eq=False)
class Kind:
    """Answers of one kind draw their tokens in the same way, so that one draw serves them all."""

    drawing: Sampling
    top_logprobs: int

    @property
    def is_special(self) -> bool:
        """Whether there is more to do than to divide by the temperature and draw."""
        how = self.drawing
        truncates = how.top_k or how.top_p < 1.0 or how.min_p
        return bool(truncates or self.top_logprobs or how.temperature == 0.0 or how.repetition_penalty != 1.0)


class StopTextMatcher:
    """Says when a text is there that ends an answer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.completing: dict[tuple[str, ...], dict[int, bool]] = {}  # texts: whether a token may complete one

    def complete(self, texts: tuple[str, ...], tokens: list[int]) -> bool:
        """Whether one is complete with the newest token."""
        if not self.may_complete(texts, tokens[-1]):
            return False
        longest = max(len(text) for text in texts)
        tail = self.tokenizer.decode(tokens[-(longest + 8) :])  # most tokens are longer than a character
        return any(text in tail for text in texts)

    def may_complete(self, texts: tuple[str, ...], token: int) -> bool:
        """Whether the token can bring the last character of a text. Most cannot: to know so is quicker than to read."""
        if texts not in self.completing and len(self.completing) >= MOST_KINDS:
            self.completing.clear()
        known = self.completing.setdefault(texts, {})
        if token not in known:
            alone, lasts = self.tokenizer.decode([token]), "".join(text[-1:] for text in texts)
            # Parts of a character are shown as \ufffd, and a space may be left out where nothing stands before it.
            unsure = "\ufffd" in alone + lasts or any(last.isspace() for last in lasts)
            known[token] = unsure or any(last in alone for last in lasts)
        return known[token]


TopLogprobs = list[tuple[int, float]]
"""The likeliest tokens at a place with their log-probabilities, from the likeliest down."""

Hear = Callable[[ActiveRequest], None]
"""Called as soon as an answer has a new token."""


class BatchScheduler:
    """Requests under way. `submit` takes one, `step` brings all a little further, `cancel` forgets one.

    A step has three parts: `begin`, `look`, `collect`. A GPU is at work while the host collects what it has seen at the
    last look, if the next step is begun before; and while it looks, if it looks at the step before (`ahead`).
    """

    def __init__(self, engine: LocalEngine, hear: Hear | None, *, mixed: bool = False, ahead: bool = False) -> None:
        """`mixed`: answers of all kinds side by side; those that are heard have log-probabilities."""
        assert engine.cache is not None and engine.slots is not None
        self.engine, self.hear, self.mixed = engine, hear, mixed
        self.runner, self.cache, self.slots, self.device = engine.runner, engine.cache, engine.slots, engine.device
        self.draw = decode_kernels_for(self.device).draw
        self.version = 0  # of the weights
        self.submitted = 0
        self.waiting: deque[ActiveRequest] = deque()
        self.live: dict[int, ActiveRequest] = {}  # by slot
        self.tokens = 0  # that one under way from the beginning would have
        self.behind = 1 if ahead else 0  # steps that `look` leaves for the next time
        self.seen: deque[Seen] = deque()
        self.leaving: list[Leaving] = []
        self.kinds: dict[tuple[Sampling, int], Kind] = {}
        self.stop_texts = StopTextMatcher(engine.tokenizer)
        self.read = hear is not None
        on_gpu = engine.graphs is not None
        self.patience = LOOK_EVERY if on_gpu and hear is None else 1
        self.worth_a_prefill = max(1, self.cache.slots // 4) if on_gpu else 1  # launching one costs several steps
        on_cuda = self.device.type == "cuda"
        self.admit_tokens = 32768 if on_cuda else 8192
        self.pass_tokens = 32768 if on_cuda else 1024  # what a CPU works on should stay in its cache

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.live)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        """Its number: from 0, in the order of submission."""
        if sampling.repetition_penalty != 1.0:
            self.slots.note(self.runner.vocabulary_size)
        self.read = self.read or bool(sampling.stop_texts)
        index = self.submitted
        self.submitted += 1
        self.waiting.append(ActiveRequest(index, request, sampling, self.kind_of(sampling, request.top_logprobs)))
        return index

    def kind_of(self, sampling: Sampling, top_logprobs: int) -> Kind:
        if (
            self.waiting
            and self.waiting[-1].sampling is sampling
            and self.waiting[-1].kind.top_logprobs == top_logprobs
        ):
            return self.waiting[-1].kind
        what = (replace(sampling, max_tokens=0, stop_texts=()), top_logprobs)  # what a captured step depends on
        if what not in self.kinds:
            assert self.mixed or not self.kinds, "a captured step draws in one way"
            if len(self.kinds) >= MOST_KINDS:  # most are of users who are long gone
                self.kinds.clear()
            self.kinds[what] = Kind(*what)
        return self.kinds[what]

    def cancel(self, index: int) -> None:
        """Its slot is free for others. One that has ended, or was never there, is nothing to cancel."""
        self.waiting = deque(answer for answer in self.waiting if answer.index != index)
        for slot in [slot for slot, answer in self.live.items() if answer.index == index]:
            self.slots.done[slot] = True
            del self.live[slot]
            self.close_gaps()

    def step(self) -> dict[int, Sample]:
        """All three parts: the answers that are complete, by number."""
        self.begin()
        self.look()
        return self.collect()

    def begin(self) -> None:
        """Let requests in, or a few tokens for those under way."""
        free = self.cache.slots - len(self.live)
        if self.waiting and free >= min(self.worth_a_prefill, len(self.waiting)):
            self.admit()
        elif self.live:
            self.advance()
        if self.live:
            state = Fetched.of(self.slots.state(max(self.live) + 1, self.patience if self.read else 0))
            self.seen.append(Seen(dict(self.live), state, self.version))

    def admit(self) -> None:
        """Move requests into free slots and run their prompts, each different prompt of neighbours once."""
        free = [slot for slot in range(self.cache.slots) if slot not in self.live]
        chosen: list[ActiveRequest] = []
        room = self.admit_tokens
        while self.waiting and len(chosen) < len(free):
            prompt = self.waiting[0].request.prompt
            if not chosen or not np.array_equal(chosen[-1].request.prompt, prompt):
                if chosen and len(prompt) > room:
                    break
                room -= len(prompt)
            chosen.append(self.waiting.popleft())
        chosen.sort(key=lambda answer: len(answer.request.prompt))  # neighbours attend together: see plain.Part
        newcomers = dict(zip(free, chosen, strict=False))
        for slot, answer in newcomers.items():
            answer.slot, answer.version = slot, self.version
            answer.ends = self.tokens - 1 + answer.sampling.max_tokens
        longest = max(answer.longest for answer in chosen)
        if longest > self.cache.capacity:
            self.cache.widen(max(self.engine.rounded(longest), 2 * self.cache.capacity))
        hidden = torch.cat([self.run_prompts(part) for part in self.passes(newcomers)])
        asked = [answer.request for answer in chosen]
        rows = self.slots.admit(list(newcomers), [r.prompt.tolist() for r in asked], [r.seed for r in asked])
        self.choose(rows, self.logits_of(hidden), chosen)
        self.live |= newcomers

    def passes(self, newcomers: dict[int, ActiveRequest]) -> Iterator[list[tuple[Ints, list[int]]]]:
        """Prompts that run together, each with the slots that share it."""
        part: list[tuple[Ints, list[int]]] = []
        tokens = 0
        for slot, answer in newcomers.items():
            prompt = answer.request.prompt
            if part and np.array_equal(part[-1][0], prompt):
                part[-1][1].append(slot)
                continue
            if part and tokens + len(prompt) > self.pass_tokens:
                yield part
                part, tokens = [], 0
            part.append((prompt, [slot]))
            tokens += len(prompt)
        yield part

    def run_prompts(self, part: list[tuple[Ints, list[int]]]) -> torch.Tensor:
        """Fill the cache; the hidden states behind the prompts, one a slot: [n, H]."""
        prompts = [Sample(tokens=prompt, mask=np.zeros(len(prompt), dtype=np.bool_)) for prompt, _ in part]
        batch = collate(prompts, self.device)
        self.cache.begin_prefill(batch.lengths, [slots for _, slots in part])
        last = batch.starts[1:].long() - 1
        if self.engine.decoder is not None:
            packing = attention.packing_for(batch, varlen_kernel=self.runner.varlen_kernel)
            hidden = self.engine.decoder.prefill(batch, packing, self.cache, last)
        else:
            hidden = self.runner.run_layers(batch, cache=self.cache).last_hidden_state[0][last]
        repeats = copy_to_device(torch.tensor([len(slots) for _, slots in part]), self.device)
        return hidden.repeat_interleave(repeats, 0, output_size=sum(len(slots) for _, slots in part))

    def advance(self) -> None:
        """A few steps: as many as nobody can end before, and no more than the host likes to wait."""
        count = min(self.engine.bucket(max(self.live) + 1), self.cache.slots)
        lefts = [answer.ends - self.tokens for answer in self.live.values()]
        left = min((left for left in lefts if left > 0), default=0)  # the others will be seen to have ended
        rows, graphs, capacity = self.slots.index[:count], self.engine.graphs, self.cache.capacity
        if self.mixed:  # drawing is not captured: it may be different for each row, and at each step
            if graphs is None:
                logits = self.forward(count, self.longest)
            else:
                graphs.run((count, None), lambda: self.keep(self.forward(count, capacity)))
                logits = self.kept(count)
            self.choose(rows, logits, [self.live.get(slot) for slot in range(count)])
            self.tokens += 1
            return
        (kind,) = self.kinds.values()
        for _ in range(min(self.patience, left)):
            if graphs is None:
                self.draw_for(rows, self.forward(count, self.longest), kind.drawing)
            else:  # all on the device, so that it can be captured
                graphs.run(
                    (count, kind.drawing), lambda: self.draw_for(rows, self.forward(count, capacity), kind.drawing)
                )
            self.tokens += 1

    @property
    def longest(self) -> int:
        """Positions that some sequence under way may have by now."""
        return max(answer.longest - max(0, answer.ends - self.tokens) for answer in self.live.values())

    def forward(self, count: int, longest: int) -> torch.Tensor:
        """Run the newest token of the first slots: logits of the next, [count, V]."""
        positions = self.slots.positions(count)
        self.cache.begin_step(positions, longest)
        tokens = self.slots.token[:count]
        if self.engine.decoder is not None:
            return self.logits_of(self.engine.decoder.decode(tokens, positions, self.cache))
        layers = getattr(self.runner.model, self.runner.model.base_model_prefix)
        out = layers(input_ids=tokens[None], position_ids=positions[None], use_cache=False, cache=self.cache)
        return self.logits_of(out.last_hidden_state[0])

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.runner.logits(hidden) if self.engine.decoder is None else self.engine.decoder.logits(hidden)

    def keep(self, logits: torch.Tensor) -> None:
        """Where they are found again after a captured step."""
        if self.engine.logits is None:
            self.engine.logits = logits.new_zeros(self.cache.slots, logits.shape[1])
        self.engine.logits[: len(logits)] = logits

    def kept(self, count: int) -> torch.Tensor:
        assert self.engine.logits is not None
        return self.engine.logits[:count]

    def choose(self, rows: torch.Tensor, logits: torch.Tensor, answers: Sequence[ActiveRequest | None]) -> None:
        """Draw the next token of each row that has an answer: all in one draw, however they are to be drawn."""
        kinds: dict[Kind, list[int]] = {}
        for place, answer in enumerate(answers):
            if answer is not None:
                kinds.setdefault(answer.kind, []).append(place)
        if len(kinds) == 1 and not any(kind.top_logprobs for kind in kinds):
            (kind,) = kinds
            self.draw_for(rows, logits, kind.drawing)
            return
        temperature = [1.0] * len(answers)
        for kind, places in kinds.items():
            for place in places:
                temperature[place] = kind.drawing.temperature or 1.0
        spots = {kind: torch.tensor(places, device=self.device) for kind, places in kinds.items() if kind.is_special}
        logits = logits.float()
        for kind, at in spots.items():
            if kind.drawing.repetition_penalty != 1.0:
                logits[at] = self.penalized(rows[at], logits[at], kind.drawing)
        logits = logits / torch.tensor(temperature, device=self.device)[:, None]
        least = logits.new_full((len(logits), 1), -torch.inf)
        for kind, at in spots.items():
            floor = ops.least_kept(logits[at], kind.drawing.top_k, kind.drawing.top_p, kind.drawing.min_p)
            if floor is not None:
                least[at] = floor
        tokens, logprobs = self.draw(logits, 1.0, least, self.slots.seed[rows], self.slots.place[rows])
        for kind, at in spots.items():
            chances = logits[at].masked_fill(logits[at] < least[at], -torch.inf).log_softmax(-1)
            if kind.drawing.temperature == 0.0:
                logprobs[at], tokens[at] = chances.max(-1)
            if kind.top_logprobs:
                best = chances.topk(min(kind.top_logprobs, chances.shape[1]))
                pairs = torch.stack([best.indices.double(), best.values.double()], -1).tolist()
                for place, of_answer in zip(kinds[kind], pairs, strict=True):
                    answer = answers[place]
                    assert answer is not None
                    answer.top_logprobs.append(
                        [(int(token), chance) for token, chance in of_answer if chance > -torch.inf]
                    )
        by_stops: dict[tuple[int, ...], list[int]] = {}
        for kind, places in kinds.items():
            by_stops.setdefault(kind.drawing.stop_ids, []).extend(places)
        for stop_ids, places in by_stops.items():
            at = torch.tensor(places, device=self.device)
            self.slots.record(rows[at], tokens[at], logprobs[at], self.slots.stops_of(stop_ids))

    def draw_for(self, rows: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> None:
        """Draw the next token of each row and note it with its log-probability."""
        slots = self.slots
        logits = self.penalized(rows, logits, sampling)
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
        slots.record(rows, tokens, logprobs, slots.stops_of(sampling.stop_ids))

    def penalized(self, rows: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        if sampling.repetition_penalty == 1.0:
            return logits
        assert self.slots.seen is not None
        penalty = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        return torch.where(self.slots.seen[rows], logits * penalty, logits)

    def look(self) -> None:
        """See who has ended."""
        while len(self.seen) > self.behind:
            self.look_at(self.seen.popleft())

    def look_at(self, seen: Seen) -> None:
        newest = self.slots.newest_logprobs(max(self.live) + 1) if self.mixed else []
        over: dict[int, bool] = {}  # slot: whether a stop text ended it
        (state,) = seen.state.wait()
        looked, moved = state.tolist(), iter(seen.live)
        if not self.read:  # only the end matters
            moved = (slot for slot in state[:, 0].nonzero()[:, 0].tolist() if slot in seen.live)
        for slot in moved:
            answer, (done, place, *tokens) = seen.live[slot], looked[slot]
            if place == answer.place or answer.slot == NOWHERE:  # others were let in, or it was seen to have ended
                continue
            said = self.read and self.reads_stop(answer, tokens[answer.place - place :])
            answer.place = len(answer.tokens) if self.read else place
            if self.mixed:
                answer.logprobs.append(newest[slot])
            if done or said or place >= answer.sampling.max_tokens:
                over[answer.slot] = said
            if self.hear is not None:
                self.hear(answer)
        if over:
            self.leave(over, seen.version)
            self.close_gaps()

    def reads_stop(self, answer: ActiveRequest, tokens: list[int]) -> bool:
        """Take its new tokens, up to the one with which a stop text is complete; whether one is."""
        texts = answer.sampling.stop_texts
        for token in tokens:
            answer.tokens.append(token)
            if texts and self.stop_texts.complete(texts, answer.tokens):
                return True
        return False

    def leave(self, over: dict[int, bool], newest: int) -> None:
        """Free their slots and send for their tokens; who comes into the slots comes after that."""
        rows = copy_to_device(torch.tensor(list(over)), self.device)
        self.slots.done[rows] = True
        answers = [self.live.pop(slot) for slot in over]
        width = max(answer.place for answer in answers)
        for answer in answers:
            answer.slot = NOWHERE
        drawn = Fetched.of(self.slots.answers[rows, :width], self.slots.logprobs[rows, :width])
        self.leaving.append(Leaving(answers, list(over.values()), drawn, newest))

    def collect(self) -> dict[int, Sample]:
        """The answers that were complete at the last look, by number."""
        ended: dict[int, Sample] = {}
        for group in self.leaving:
            tokens, logprobs = (stream.numpy() for stream in group.drawn.wait())
            tokens = tokens.astype(np.int32)
            for row, (answer, said) in enumerate(zip(group.answers, group.stopped, strict=True)):
                chosen, chances = tokens[row, : answer.place], logprobs[row, : answer.place]
                finish = "stop" if said or int(chosen[-1]) in answer.sampling.stop_ids else "length"
                ended[answer.index] = finished(answer, chosen, chances, finish, group.newest)
        self.leaving = []
        return ended

    def close_gaps(self) -> None:
        """When fewer slots would do, the sequences in the last ones move to the front."""
        size = self.engine.bucket(len(self.live)) if self.live else 0
        late = sorted(slot for slot in self.live if slot >= size)
        if not late or self.engine.bucket(late[-1] + 1) == size:
            return
        gaps = [slot for slot in range(size) if slot not in self.live][: len(late)]
        sources, targets = copy_to_device(torch.tensor([late, gaps]), self.device)
        self.cache.move(sources, targets, self.longest)
        self.slots.move(sources, targets)
        for source, target in zip(late, gaps, strict=True):
            self.live[target] = self.live.pop(source)
            self.live[target].slot = target


def finished(answer: ActiveRequest, tokens: Ints, logprobs: Floats, finish: str, newest: int) -> Sample:
    prompt = answer.request.prompt
    return Sample(
        tokens=np.concatenate([prompt, tokens]),
        mask=np.arange(len(prompt) + len(tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
        group=answer.request.group,
        version=answer.version,
        newest=newest,
        finish=finish,
    )
