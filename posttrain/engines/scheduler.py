"""Continuous batching: which requests have a slot, what runs next, which requests are finished."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.errors import PosttrainError, UsageError
from posttrain.core.types import Experts, Floats, Ints, Sample, WeightVersion
from posttrain.engines.base import Constraint, GenerationRequest, Sampling
from posttrain.engines.block_pool import block_hashes
from posttrain.engines.drafts import Drafter, SequenceDrafts
from posttrain.engines.executor import ModelExecutor
from posttrain.engines.kv_cache import PromptPart
from posttrain.engines.sampling import SamplingGroup, TokenSampler, TopLogprobs, constrain
from posttrain.engines.stop_text import StopTextMatcher
from posttrain.nn.routing import NOT_RECORDED

STEPS_PER_CHECK = 8  # captured steps between two checks by the host
NO_SLOT = -1  # of a request that waits or is finished
MAX_GROUPS = 256  # sampling groups that are remembered
# A prefill costs as much as several decode steps. If memory, not slots, limits how many requests are admitted, they
# wait until at least one for this many active ones can be.
ACTIVE_PER_ADMITTED = 16

log = logging.getLogger("posttrain")


NOTHING: tuple[Ints, Floats] = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


@dataclass(slots=True)
class ActiveRequest:
    """A request that waits or runs."""

    index: int  # in order of submission
    request: GenerationRequest
    sampling: Sampling
    group: SamplingGroup
    adapter: int = 0  # number in the engine's set; 0: none
    slot: int = NO_SLOT
    blocks: list[int] = field(default_factory=list)  # of the KV cache
    admission: int = 0  # counts admissions; the newest are preempted first
    admitted_version: WeightVersion = 0  # of the weights when its prompt began to be computed
    last_step: int = 0  # value of BatchScheduler.steps at which it has max_tokens
    length: int = 0  # tokens of the completion at the last check; if tokens are not read, only set when it finishes
    version: WeightVersion = 0  # of the weights that sampled its first token
    tokens: list[int] = field(default_factory=list)  # only where tokens are read: for streaming or stop texts
    logprobs: list[float] = field(default_factory=list)  # only for streaming
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # per token, if the request asks for them
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of known_tokens, if prefixes are reused
    reused_tokens: int = 0  # of the prompt, found in the cache when it was admitted first
    preemptions: int = 0
    begun: tuple[Ints, Floats] = NOTHING  # tokens and log-probabilities sampled before: preempted, or of the request
    drafts: SequenceDrafts | None = None  # once it was among few active sequences

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest allowed completion."""
        return len(self.request.prompt) + self.sampling.max_tokens

    @property
    def computed_tokens(self) -> int:
        """Tokens of a finished request whose keys are in the cache."""
        return len(self.request.prompt) + self.length - 1

    @property
    def known_tokens(self) -> Ints:
        """What a prefill computes: the prompt, and the completion so far if it was preempted."""
        return np.concatenate([self.request.prompt, self.begun[0]]) if len(self.begun[0]) else self.request.prompt


@dataclass(slots=True)
class SharedPrompt:
    """A prompt that is being computed, and the requests that have it."""

    tokens: Ints
    requests: list[ActiveRequest]
    version: WeightVersion  # of the weights when it was admitted
    adapter: int = 0
    computed: int = 0  # tokens whose keys and values are in the cache

    def next_part(self, size: int) -> PromptPart:
        """Return the next tokens to compute. Parts end at multiples of `size`, so they are the same in every batch."""
        end = min(len(self.tokens), (self.computed // size + 1) * size)
        blocks = [active.blocks for active in self.requests]
        part = PromptPart(self.tokens[self.computed : end], blocks, self.computed, self.adapter)
        self.computed = end
        return part

    def fits_one_part(self, size: int) -> bool:
        return len(self.tokens) <= (self.computed // size + 1) * size


@dataclass(slots=True)
class HostCopy:
    """Tensors that are being copied from the device to the host."""

    tensors: list[torch.Tensor]
    finished: torch.cuda.Event | None = None

    @classmethod
    def start(cls, *tensors: torch.Tensor) -> HostCopy:
        """Start an asynchronous copy; later work on the device may overwrite the tensors."""
        on_cuda = tensors[0].is_cuda
        copy = cls([tensor.to("cpu", non_blocking=on_cuda) for tensor in tensors])
        if on_cuda:
            copy.finished = torch.cuda.Event()
            copy.finished.record()
        return copy

    def wait(self) -> list[torch.Tensor]:
        if self.finished is not None:
            self.finished.synchronize()
        return self.tensors


@dataclass(slots=True)
class StepSnapshot:
    """The state of all active requests after a step, on its way to the host."""

    active: dict[int, ActiveRequest]  # by their slots at that time
    summary: HostCopy  # see SlotState.summary
    logprobs: HostCopy | None  # of the newest tokens, if they are streamed
    version: WeightVersion  # of the weights that sampled the newest tokens
    steps: int  # decode steps so far


@dataclass(slots=True)
class FinishedRequests:
    """Requests that finished at the same check."""

    requests: list[ActiveRequest]
    stopped_by_text: list[bool]
    outputs: HostCopy  # tokens and log-probabilities: [requests, length of the longest]
    version: WeightVersion  # of the weights that sampled the last tokens
    experts: HostCopy | None  # of all tokens but the last of each request, end to end, if the cache records them

    def split_experts(self) -> list[Experts | None]:
        """Return the experts of the tokens of each request; those of its last token are not known."""
        if self.experts is None:
            return [None] * len(self.requests)
        (whole,) = self.experts.wait()
        ends = np.cumsum([active.computed_tokens for active in self.requests])
        parts = np.split(whole.numpy(), ends[:-1])
        return [np.pad(part, ((0, 1), (0, 0), (0, 0)), constant_values=NOT_RECORDED) for part in parts]


OnNewToken = Callable[[ActiveRequest], None]
"""Called when a request has a new token."""


class BatchScheduler:
    """Active requests of one executor. `submit` adds one, `step` advances all, `cancel` removes one.

    Blocks of the KV cache are allocated as sequences grow. If they run out, the newest sequences are preempted: their
    blocks are freed, and they are computed again, from the tokens they have, when there is room.

    A step has three parts. `start_step` launches work on the device, `check` reads which requests are finished,
    `collect` builds their samples. A GPU works while the host collects, if the next step is started first; and while
    the host checks, if it checks one step behind (`check_behind`).

    With a `drafter`, a step of few sequences also computes tokens that may follow their last ones, and appends all that
    prove to be what is sampled. The host then has to know the newest tokens, so it checks before every such step.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        tokenizer: Any,
        on_new_token: OnNewToken | None,
        *,
        mixed: bool = False,
        check_behind: bool = False,
        reuse_prefixes: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        """`mixed`: requests may have different sampling settings; they are streamed with log-probabilities.

        `reuse_prefixes`: as GenerationRequest.reuse_prefix says; else never.
        """
        self.reuse_prefixes = reuse_prefixes
        self.reused_tokens = 0  # of prompts, found in the cache
        self.executor, self.on_new_token, self.mixed = executor, on_new_token, mixed
        self.cache, self.slots, self.device = executor.cache, executor.slots, executor.device
        self.sampler = TokenSampler(self.slots)
        self.version: WeightVersion = 0
        self.submitted = 0
        self.waiting: deque[ActiveRequest] = deque()
        self.active: dict[int, ActiveRequest] = {}  # by slot
        self.prefilling: deque[SharedPrompt] = deque()  # long prompts, computed in parts between decode steps
        self.admissions = self.preemptions = 0
        self.steps = 0  # decode steps so far
        self.unchecked_steps = 1 if check_behind else 0  # newest snapshots that `check` leaves for the next call
        self.drafter = drafter
        self.draft_tokens = self.accepted_tokens = 0  # of finished requests
        self.verified = False  # whether the last step had drafts: how far sequences have advanced is not known
        self.snapshots: deque[StepSnapshot] = deque()
        self.finished: list[FinishedRequests] = []
        self.groups: dict[tuple[Sampling, int], SamplingGroup] = {}
        self.stop_text = StopTextMatcher(tokenizer)
        self.reads_tokens = on_new_token is not None
        captures, on_cuda = executor.graphs is not None, self.device.type == "cuda"
        self.steps_per_check = STEPS_PER_CHECK if captures and on_new_token is None else 1
        # A prefill costs as much as several decode steps.
        self.min_prefill = max(1, self.cache.slots // 4) if captures else 1
        self.admit_tokens = 32768 if on_cuda else 8192
        self.prefill_tokens = 32768 if on_cuda else 1024  # a CPU's working set should stay in its cache
        # Longer prompts are computed in parts of this size: others go on decoding between them. Without the varlen
        # kernel attention has a mask of this size times the length.
        self.part_tokens = (8192 if executor.runner.varlen_kernel else 2048) if on_cuda else self.prefill_tokens

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active or self.prefilling)

    @property
    def admitted(self) -> list[ActiveRequest]:
        """The requests that have blocks of the KV cache."""
        return [*self.active.values(), *(active for shared in self.prefilling for active in shared.requests)]

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        """Add a request; returns its number, counted from 0."""
        assert self.mixed or request.constraint is None, "a captured step cannot ask which tokens are allowed"
        if sampling.repetition_penalty != 1.0:
            self.slots.start_tracking_seen(self.executor.runner.vocabulary_size)
        self.reads_tokens = self.reads_tokens or bool(sampling.stop_texts)
        index = self.submitted
        self.submitted += 1
        group = self.group_for(sampling, request.top_logprobs)
        if request.token_limit:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, request.token_limit))
        active = ActiveRequest(index, request, sampling, group, self.adapter_of(request))
        if request.begun is not None:
            assert len(request.begun[0]) < sampling.max_tokens, "there is nothing to generate"
            active.begun, active.tokens, active.length = request.begun, request.begun[0].tolist(), len(request.begun[0])
        self.waiting.append(active)
        return index

    def adapter_of(self, request: GenerationRequest) -> int:
        """Return the number of a request's adapter."""
        known = {"": 0} if self.executor.adapters is None else self.executor.adapters.numbers
        if request.adapter not in known:
            raise UsageError(
                f"no adapter is named {request.adapter!r}; there are {', '.join(filter(None, known)) or 'none'}"
            )
        return known[request.adapter]

    def group_for(self, sampling: Sampling, top_logprobs: int) -> SamplingGroup:
        last = self.waiting[-1] if self.waiting else None
        if last is not None and last.sampling is sampling and last.group.top_logprobs == top_logprobs:
            return last.group
        key = (replace(sampling, max_tokens=0, stop_texts=()), top_logprobs)  # what a captured step depends on
        if key not in self.groups:
            assert self.mixed or not self.groups, "a captured step samples in one way"
            if len(self.groups) >= MAX_GROUPS:  # most belong to requests that finished long ago
                self.groups.clear()
            self.groups[key] = SamplingGroup(*key)
        return self.groups[key]

    def cancel(self, index: int) -> None:
        """Remove a request and free its slot; nothing happens if it is finished or unknown."""
        self.waiting = deque(request for request in self.waiting if request.index != index)
        for active in [active for active in self.admitted if active.index == index]:
            self.drop([active])
            self.compact()

    def drop(self, requests: Sequence[ActiveRequest]) -> None:
        """Free the slots and blocks of requests."""
        slots = [active.slot for active in requests if active.slot != NO_SLOT]
        if slots:
            self.slots.release(copy_to_device(torch.tensor(slots), self.device))
        for slot in slots:
            del self.active[slot]
            self.cache.assign(slot, ())
        for active in requests:
            self.cache.pool.release(active.blocks)
            active.slot, active.blocks = NO_SLOT, []
            for shared in self.prefilling:
                shared.requests = [other for other in shared.requests if other is not active]
        self.prefilling = deque(shared for shared in self.prefilling if shared.requests)

    def step(self) -> dict[int, Sample]:
        """Run all three parts; returns the samples of finished requests by number."""
        self.start_step()
        self.check()
        return self.collect()

    # Launching work

    def start_step(self) -> None:
        """Admit waiting requests, or decode a few tokens of the active ones."""
        sampled = self.continue_prefill()
        free = self.cache.slots - len(self.admitted)
        if self.waiting and free >= min(self.min_prefill, len(self.waiting)):
            sampled = self.admit(free) or sampled
        self.verified = False
        if self.active and not sampled:  # at most `newest` new tokens of a sequence between two checks
            self.decode()
        if self.active:
            newest = max(self.steps_per_check, 1 + self.slots.drafts.shape[1]) if self.reads_tokens else 0
            count = max(self.active) + 1
            summary = HostCopy.start(self.slots.summary(count, newest))
            logprobs = HostCopy.start(self.slots.newest_logprobs(count, newest)) if self.mixed else None
            self.snapshots.append(StepSnapshot(dict(self.active), summary, logprobs, self.version, self.steps))

    def admit(self, free: int) -> bool:
        """Prefill waiting requests, as far as slots and memory allow; returns whether tokens were sampled."""
        chosen = self.choose_waiting(free)
        for active in chosen:
            self.waiting.popleft()
            self.admissions += 1
            active.admission = self.admissions
        chosen.sort(key=lambda active: len(active.known_tokens))  # neighbours attend together: reference.RowBlock
        prompts = self.share_prompts(chosen)
        self.prefilling.extend(prompt for prompt in prompts if not prompt.fits_one_part(self.part_tokens))
        short = [prompt for prompt in prompts if prompt.fits_one_part(self.part_tokens)]
        if short:
            parts = [prompt.next_part(self.part_tokens) for prompt in short]
            hidden = torch.cat([self.executor.prefill(batch) for batch in self.prefill_batches(parts)])
            for prompt in short:
                self.remember(prompt)
            self.activate([active for prompt in short for active in prompt.requests], hidden)
        return bool(short)

    def choose_waiting(self, free: int) -> list[ActiveRequest]:
        """Choose the next requests to admit: as many as `free` slots and free blocks allow.

        Every sequence that can still grow keeps one free block in reserve. Without it, the next decode steps would
        preempt what was just admitted.
        """
        pool, admitted = self.cache.pool, self.admitted
        reserve = sum(self.max_blocks(active) > len(active.blocks) for active in admitted)
        chosen: list[ActiveRequest] = []
        blocks, budget = pool.available, self.admit_tokens
        for active in self.waiting:
            tokens = active.known_tokens
            if len(chosen) == free:
                return chosen
            shares = bool(chosen) and chosen[-1].adapter == active.adapter
            shares = shares and np.array_equal(chosen[-1].known_tokens, tokens)
            if chosen and not shares and len(tokens) > budget:
                return chosen
            own = pool.blocks_for(len(tokens) + 1)
            blocks -= 1 if shares else own - sum(pool.references[block] > 0 for block in self.known_blocks(active))
            if blocks < reserve:
                if not admitted and not chosen:
                    raise self.out_of_memory(len(tokens) + 1)
                return chosen if len(chosen) * ACTIVE_PER_ADMITTED >= len(admitted) else []
            reserve += self.max_blocks(active) > own
            budget -= 0 if shares else len(tokens)
            chosen.append(active)
        return chosen

    def max_blocks(self, active: ActiveRequest) -> int:
        """Return how many blocks a request has if it reaches max_tokens; keys of the last token are not stored."""
        return self.cache.pool.blocks_for(active.max_length - 1)

    def share_prompts(self, chosen: Sequence[ActiveRequest]) -> list[SharedPrompt]:
        """Allocate blocks for prompts; neighbours with equal prompts share one prefill and its full blocks."""
        pool = self.cache.pool
        prompts: list[SharedPrompt] = []
        for active in chosen:
            tokens, active.admitted_version = active.known_tokens, self.version
            if prompts and prompts[-1].adapter == active.adapter and np.array_equal(prompts[-1].tokens, tokens):
                full = prompts[-1].requests[0].blocks[: len(tokens) // pool.size]
                active.blocks = pool.share(full) + pool.allocate(1)  # the last block will be written
                prompts[-1].requests.append(active)
            else:
                known = pool.share(self.known_blocks(active))
                active.blocks = known + pool.allocate(pool.blocks_for(len(tokens) + 1) - len(known))
                prompts.append(SharedPrompt(tokens, [active], self.version, active.adapter, len(known) * pool.size))
            if not active.preemptions:
                active.reused_tokens = prompts[-1].computed
                self.reused_tokens += active.reused_tokens
        return prompts

    def known_blocks(self, active: ActiveRequest) -> list[int]:
        """Return the blocks of the cache that hold the first tokens of a request; at least one token is left."""
        if not (self.reuse_prefixes and active.request.reuse_prefix):
            return []
        pool, tokens = self.cache.pool, active.known_tokens
        active.hashes = block_hashes(tokens, pool.size, active.hashes, active.request.adapter)
        return pool.find(active.hashes[: (len(tokens) - 1) // pool.size])

    def remember(self, prompt: SharedPrompt) -> None:
        """Make the full blocks of a computed prompt known to later requests."""
        active = prompt.requests[0]
        if self.reuse_prefixes and active.request.reuse_prefix and prompt.version == self.version:
            self.cache.pool.register(active.blocks, active.hashes)

    def prefill_batches(self, parts: Sequence[PromptPart]) -> Iterator[list[PromptPart]]:
        """Divide prompts into batches of at most `prefill_tokens`."""
        batch: list[PromptPart] = []
        tokens = 0
        for part in parts:
            size = part.begin + len(part.tokens)  # keys that it attends to
            if batch and tokens + size > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(part)
            tokens += size
        yield batch

    def continue_prefill(self) -> bool:
        """Compute the next part of a long prompt, if there is one; returns whether tokens were sampled."""
        if not self.prefilling:
            return False
        prompt = self.prefilling[0]
        hidden = self.executor.prefill([prompt.next_part(self.part_tokens)])
        if prompt.computed < len(prompt.tokens):
            return False
        self.prefilling.popleft()
        self.remember(prompt)
        self.activate(prompt.requests, hidden)
        return True

    def activate(self, requests: Sequence[ActiveRequest], hidden: torch.Tensor) -> None:
        """Give prefilled requests slots and sample their next tokens; `hidden` is of the last token of each."""
        free = (slot for slot in range(self.cache.slots) if slot not in self.active)
        activated = dict(zip(free, requests, strict=False))
        for slot, active in activated.items():
            active.slot = slot
            self.cache.assign(slot, active.blocks)
            begun = len(active.begun[0])
            active.last_step = self.steps - 1 + active.sampling.max_tokens - begun
            if not begun:
                active.version = self.version
        prompts, seeds = [active.request.prompt for active in requests], [active.request.seed for active in requests]
        earlier, adapters = [active.begun for active in requests], [active.adapter for active in requests]
        limits = [active.sampling.max_tokens for active in requests]
        rows = self.slots.admit(list(activated), prompts, seeds, earlier, adapters, limits)
        self.sample(rows, self.executor.logits(hidden), requests)
        self.active |= activated

    def decode(self) -> None:
        """Run decode steps until a request reaches max_tokens, at most `steps_per_check`; with drafts one step."""
        if self.has_few_sequences:
            self.check_all()
            self.read_from_now_on()
        steps = self.reserve_blocks()
        if not self.active:
            return
        count = min(self.executor.step_size(max(self.active) + 1), self.cache.slots)
        drafted = self.propose_drafts(count) if self.has_few_sequences else 0
        for _ in range(1 if drafted else steps):
            self.run_step(count, drafted)
            self.steps += 1
        self.verified = drafted > 0

    def run_step(self, count: int, drafted: int) -> None:
        """Sample the next token in each of the first `count` slots, and of its `drafted` tokens those that follow."""
        executor, rows = self.executor, self.slots.index[:count]
        graphs, capacity = executor.graphs, self.cache.capacity
        longest = capacity if graphs is not None else min(self.longest + drafted, capacity)
        if self.mixed:  # sampling is not captured: it may differ per row and per step
            if graphs is None:
                logits = executor.decode(count, longest, drafted)
            else:
                logits = executor.decode_captured(count, drafted)
            self.sample(rows, logits, [self.active.get(slot) for slot in range(count)])
            return
        (group,) = self.groups.values()
        sampling, sampler = group.sampling, self.sampler

        def step() -> None:
            sampler.sample(rows, executor.decode(count, longest, drafted), sampling)

        if graphs is None:
            step()
        else:  # everything is on the device, so that the step can be captured
            graphs.run((count, sampling, drafted), step)

    # Speculative decoding

    @property
    def has_few_sequences(self) -> bool:
        """Whether so few sequences are active that drafts pay."""
        return self.drafter is not None and 0 < len(self.active) <= self.drafter.max_sequences

    def check_all(self) -> None:
        """Wait for the device and read all that it has sampled."""
        while self.snapshots:
            self.check_snapshot(self.snapshots.popleft())

    def read_from_now_on(self) -> None:
        """Copy the tokens of all sequences to the host, unless it has read them so far, and read the next ones."""
        if self.reads_tokens:
            return
        self.reads_tokens = True
        for active in self.active.values():
            active.tokens = self.slots.completion(active.slot)[0].tolist()
        for active in (*self.waiting, *(active for shared in self.prefilling for active in shared.requests)):
            active.tokens = active.begun[0].tolist()
        for active in (*self.admitted, *self.waiting):
            active.length = len(active.tokens)

    def propose_drafts(self, count: int) -> int:
        """Set the drafts of the first `count` slots; returns how many drafted tokens a step computes per slot."""
        assert self.drafter is not None
        drafts: dict[int, list[int]] = {}
        for slot, active in self.active.items():
            if active.request.constraint is not None or active.request.top_logprobs:  # known one token at a time
                continue
            if active.drafts is None:
                active.drafts = self.drafter.open(active.request, active.tokens)
            most = min(self.drafter.tokens, active.sampling.max_tokens - len(active.tokens) - 1)
            draft = active.drafts.propose(most)
            active.drafts.proposed = draft[: self.room_for_draft(active, len(draft))]
            if active.drafts.proposed:
                drafts[slot] = active.drafts.proposed
                active.last_step -= len(active.drafts.proposed)  # tokens_of is an upper bound, until it is checked
        if not drafts:
            return 0
        self.cache.upload_table()
        self.slots.set_drafts(drafts, count)
        return self.drafter.tokens if self.executor.bucketed else max(map(len, drafts.values()))

    def room_for_draft(self, active: ActiveRequest, count: int) -> int:
        """Return how many tokens of a draft fit into blocks: its own, or free ones. No sequence is preempted for it."""
        pool = self.cache.pool
        missing = pool.blocks_for(self.tokens_of(active) + count) - len(active.blocks)
        if more := pool.allocate(min(max(0, missing), pool.available)):
            active.blocks += more
            self.cache.assign(active.slot, active.blocks)
        return min(count, len(active.blocks) * pool.size - self.tokens_of(active))

    def next_steps(self) -> int:
        """Return how many steps the next `decode` runs."""
        remaining = [active.last_step - self.steps for active in self.active.values()]
        left = min((steps for steps in remaining if steps > 0), default=0)  # the next check finds the others finished
        return 1 if self.mixed else min(self.steps_per_check, left)

    def reserve_blocks(self) -> int:
        """Allocate what active sequences need in the next decode steps, by preemption if need be; returns the steps."""
        pool = self.cache.pool
        while self.active:
            steps = self.next_steps()
            missing = {}
            for slot, active in self.active.items():
                positions = min(self.tokens_of(active) + steps - 1, active.max_length - 1)
                if (count := pool.blocks_for(positions) - len(active.blocks)) > 0:
                    missing[slot] = count
            if sum(missing.values()) <= pool.available:
                for slot, count in missing.items():
                    self.active[slot].blocks += pool.allocate(count)
                    self.cache.assign(slot, self.active[slot].blocks)
                self.cache.upload_table()
                return steps
            if self.snapshots:  # sequences that are not known to be finished yet have blocks, too
                self.check_snapshot(self.snapshots.popleft())
            else:
                self.preempt()
        return 0

    def preempt(self) -> None:
        """Free the blocks of the newest sequence; it is the next to be admitted, and keeps what was sampled."""
        admitted = self.admitted
        newest = max(admitted, key=lambda active: active.admission)
        if len(admitted) == 1:
            raise self.out_of_memory(self.tokens_of(newest) + 1)
        if not self.preemptions:
            log.warning(
                f"generation: the KV cache of {self.cache.pool.count * self.cache.pool.size:,} tokens is full; the "
                f"newest of {len(admitted)} sequences waits and is computed again. The completions are the same. "
                "If this happens often, generate fewer at a time or give the cache more memory."
            )
        self.preemptions += 1
        newest.preemptions += 1
        if newest.slot != NO_SLOT:
            newest.begun = self.slots.completion(newest.slot)
        self.drop([newest])
        self.waiting.appendleft(newest)
        self.compact()

    def out_of_memory(self, tokens: int) -> PosttrainError:
        pool = self.cache.pool
        return PosttrainError(
            f"generation: one sequence of {tokens:,} tokens does not fit into the KV cache, which has memory for "
            f"{pool.count * pool.size:,}. Use shorter prompts or fewer max_tokens, or leave generation more memory."
        )

    def tokens_of(self, active: ActiveRequest) -> int:
        """Return an upper bound of the tokens of an active sequence; the last of them is not in the cache."""
        return active.max_length - max(0, active.last_step - self.steps)

    @property
    def longest(self) -> int:
        """Upper bound of the positions of the longest active sequence."""
        return max(self.tokens_of(active) for active in self.active.values())

    def sample(self, rows: torch.Tensor, logits: torch.Tensor, requests: Sequence[ActiveRequest | None]) -> None:
        """Sample the next token of each row that has a request."""
        groups: dict[SamplingGroup, list[int]] = {}
        constraints: dict[int, Constraint] = {}
        for index, active in enumerate(requests):
            if active is not None:
                groups.setdefault(active.group, []).append(index)
                if active.request.constraint is not None:
                    constraints[index] = active.request.constraint
        if constraints:
            per_row = len(logits) // len(rows)  # a row with a constraint has no draft
            logits = constrain(logits, {index * per_row: each for index, each in constraints.items()})
        for index, top_logprobs in self.sampler.sample_groups(rows, logits, groups).items():
            active = requests[index]
            assert active is not None
            active.top_logprobs.append(top_logprobs)

    # Reading results

    def check(self) -> None:
        """Find the requests that have finished in the steps that are not checked yet."""
        while len(self.snapshots) > (0 if self.verified else self.unchecked_steps):
            self.check_snapshot(self.snapshots.popleft())

    def check_snapshot(self, snapshot: StepSnapshot) -> None:
        finished: dict[int, bool] = {}  # slot -> whether a stop text ended it
        (summary,) = snapshot.summary.wait()
        logprobs = [] if snapshot.logprobs is None else snapshot.logprobs.wait()[0].tolist()
        rows, slots = summary.tolist(), iter(snapshot.active)
        if not self.reads_tokens:  # only finished requests matter
            slots = (slot for slot in summary[:, 0].nonzero()[:, 0].tolist() if slot in snapshot.active)
        for slot in slots:
            active, (done, length, *tokens) = snapshot.active[slot], rows[slot]
            if length == active.length or active.slot == NO_SLOT:  # not advanced, or known to be finished
                continue
            stopped, new = False, active.length - length  # negative: they are the last ones
            if self.reads_tokens:
                active.last_step = snapshot.steps + active.sampling.max_tokens - length
                stopped = self.read_tokens(active, tokens[new:], logprobs[slot][new:] if logprobs else [])
            active.length = len(active.tokens) if self.reads_tokens else length
            if done or stopped or length >= active.sampling.max_tokens:
                finished[active.slot] = stopped
        if finished:
            self.finish(finished, snapshot.version)
            self.compact()

    def read_tokens(self, active: ActiveRequest, tokens: list[int], logprobs: list[float]) -> bool:
        """Append new tokens, up to the one that completes a stop text; returns whether one does."""
        texts, constraint = active.sampling.stop_texts, active.request.constraint
        if active.drafts is not None:
            active.drafts.report(tokens)
        for i, token in enumerate(tokens):
            active.tokens.append(token)
            active.logprobs += logprobs[i : i + 1]
            if constraint is not None:
                constraint.advance(token)
            stopped = bool(texts) and self.stop_text.matches(texts, active.tokens)
            if self.on_new_token is not None:
                self.on_new_token(active)
            if stopped:
                return True
        return False

    def finish(self, finished: dict[int, bool], version: WeightVersion) -> None:
        """Free the slots of finished requests and start to copy their tokens, before others overwrite them."""
        rows = copy_to_device(torch.tensor(list(finished)), self.device)
        requests = [self.active[slot] for slot in finished]
        longest = max(active.length for active in requests)
        outputs = HostCopy.start(self.slots.tokens[rows, :longest], self.slots.logprobs[rows, :longest])
        experts = self.recorded_experts(requests)
        for active in requests:
            self.remember_completion(active)
        self.drop(requests)
        self.finished.append(FinishedRequests(requests, list(finished.values()), outputs, version, experts))

    def recorded_experts(self, requests: Sequence[ActiveRequest]) -> HostCopy | None:
        """Start to copy the experts of the tokens of finished requests; their last tokens were not computed."""
        if self.cache.experts is None:
            return None
        places = [self.cache.places_of(active.blocks, np.arange(active.computed_tokens)) for active in requests]
        index = copy_to_device(torch.from_numpy(np.concatenate(places)), self.device)
        return HostCopy.start(self.cache.experts.index_select(0, index))

    def remember_completion(self, active: ActiveRequest) -> None:
        """Make the full blocks of a finished sequence known, if its tokens are; its last token was not computed."""
        wanted = self.reuse_prefixes and active.request.reuse_prefix
        if wanted and active.tokens and active.admitted_version == self.version:
            tokens = np.array(active.tokens[:-1], dtype=np.int32)
            known = np.concatenate([active.request.prompt, tokens])
            hashes = block_hashes(known, self.cache.pool.size, active.hashes, active.request.adapter)
            self.cache.pool.register(active.blocks, hashes)

    def collect(self) -> dict[int, Sample]:
        """Build the samples of the requests that the last checks found finished, by number."""
        samples: dict[int, Sample] = {}
        for group in self.finished:
            tokens, logprobs = (stream.numpy() for stream in group.outputs.wait())
            tokens = tokens.astype(np.int32)
            experts = group.split_experts()
            for row, (active, stopped) in enumerate(zip(group.requests, group.stopped_by_text, strict=True)):
                own_tokens, own_logprobs = tokens[row, : active.length], logprobs[row, : active.length]
                finish = "stop" if stopped or int(own_tokens[-1]) in active.sampling.stop_ids else "length"
                sample = build_sample(active, own_tokens, own_logprobs, finish, group.version)
                sample.experts = experts[row]
                samples[active.index] = sample
                if self.drafter is not None:
                    self.drafter.keep(active.request, own_tokens.copy(), indexed=active.drafts is not None)
                self.draft_tokens += sample.draft_tokens
                self.accepted_tokens += sample.accepted_tokens
        self.finished = []
        return samples

    def compact(self) -> None:
        """Move the sequences of the last slots into gaps, if a step then computes fewer slots."""
        size = self.executor.step_size(len(self.active)) if self.active else 0
        late = sorted(slot for slot in self.active if slot >= size)
        if not late or self.executor.step_size(late[-1] + 1) == size:
            return
        gaps = [slot for slot in range(size) if slot not in self.active][: len(late)]
        longest = max(self.tokens_of(active) - len(active.request.prompt) for active in self.active.values())
        self.executor.move(late, gaps, longest)
        for source, target in zip(late, gaps, strict=True):
            self.active[target] = self.active.pop(source)
            self.active[target].slot = target


def build_sample(active: ActiveRequest, tokens: Ints, logprobs: Floats, finish: str, version: WeightVersion) -> Sample:
    prompt = active.request.prompt
    return Sample(
        tokens=np.concatenate([prompt, tokens]),
        mask=np.arange(len(prompt) + len(tokens)) >= len(prompt),
        logprobs=np.concatenate([np.zeros(len(prompt), dtype=np.float32), logprobs]),
        group=active.request.group,
        version=active.version,
        newest=version,
        finish=finish,
        preemptions=active.preemptions,
        reused=active.reused_tokens / len(prompt),
        draft_tokens=0 if active.drafts is None else active.drafts.drafted,
        accepted_tokens=0 if active.drafts is None else active.drafts.accepted,
    )
