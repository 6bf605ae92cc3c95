"""Continuous batching: which requests have a slot, what runs next, which requests are finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.types import Floats, Ints, Sample, WeightVersion
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.executor import ModelExecutor, SharedPrompt
from posttrain.engines.kv_cache import round_length
from posttrain.engines.sampling import SamplingGroup, TokenSampler, TopLogprobs
from posttrain.engines.stop_text import StopTextMatcher

STEPS_PER_CHECK = 8  # captured steps between two checks by the host
NO_SLOT = -1  # of a request that waits or is finished
MAX_GROUPS = 256  # sampling groups that are remembered


@dataclass(slots=True)
class ActiveRequest:
    """A request that waits or runs."""

    index: int  # in order of submission
    request: GenerationRequest
    sampling: Sampling
    group: SamplingGroup
    slot: int = NO_SLOT
    last_step: int = 0  # the scheduler's count of steps at which it has max_tokens
    length: int = 0  # tokens at the last check; where tokens are not read, known only once it is finished
    version: WeightVersion = 0  # of the weights that sampled its first token
    tokens: list[int] = field(default_factory=list)  # only where tokens are read: for streaming or stop texts
    logprobs: list[float] = field(default_factory=list)  # only for streaming
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # per token, if the request asks for them

    @property
    def max_length(self) -> int:
        """Tokens of the prompt and of the longest allowed completion."""
        return len(self.request.prompt) + self.sampling.max_tokens


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
    """The state of all active requests after a step."""

    active: dict[int, ActiveRequest]  # by their slots at that time
    summary: HostCopy  # see SlotState.summary
    version: WeightVersion  # of the weights that sampled the newest tokens


@dataclass(slots=True)
class FinishedRequests:
    """Requests that finished at the same check."""

    requests: list[ActiveRequest]
    stopped_by_text: list[bool]
    outputs: HostCopy  # tokens and log-probabilities: [requests, length of the longest]
    version: WeightVersion  # of the weights that sampled the last tokens


OnNewToken = Callable[[ActiveRequest], None]
"""Called when a request has a new token."""


class BatchScheduler:
    """Active requests of one executor. `submit` adds one, `step` advances all, `cancel` removes one.

    A step has three parts. `start_step` launches work on the device, `check` reads which requests are finished,
    `collect` builds their samples. A GPU works while the host collects, if the next step is started first; and while
    the host checks, if it checks one step behind (`check_behind`).
    """

    def __init__(
        self,
        executor: ModelExecutor,
        tokenizer: Any,
        on_new_token: OnNewToken | None,
        *,
        mixed: bool = False,
        check_behind: bool = False,
    ) -> None:
        """`mixed`: requests may have different sampling settings; they are streamed with log-probabilities."""
        self.executor, self.on_new_token, self.mixed = executor, on_new_token, mixed
        self.cache, self.slots, self.device = executor.cache, executor.slots, executor.device
        self.sampler = TokenSampler(self.slots)
        self.version: WeightVersion = 0
        self.submitted = 0
        self.waiting: deque[ActiveRequest] = deque()
        self.active: dict[int, ActiveRequest] = {}  # by slot
        self.steps = 0  # number of tokens of a request that has been active from the start
        self.unchecked_steps = 1 if check_behind else 0  # that `check` leaves for the next time
        self.snapshots: deque[StepSnapshot] = deque()
        self.finished: list[FinishedRequests] = []
        self.groups: dict[tuple[Sampling, int], SamplingGroup] = {}
        self.stop_text = StopTextMatcher(tokenizer)
        self.reads_tokens = on_new_token is not None
        captures, on_cuda = executor.graphs is not None, self.device.type == "cuda"
        self.steps_per_check = STEPS_PER_CHECK if captures and on_new_token is None else 1
        self.min_prefill = max(1, self.cache.slots // 4) if captures else 1  # launching one costs several steps
        self.admit_tokens = 32768 if on_cuda else 8192
        self.prefill_tokens = 32768 if on_cuda else 1024  # a CPU's working set should stay in its cache

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def submit(self, request: GenerationRequest, sampling: Sampling) -> int:
        """Add a request; returns its number, counted from 0."""
        if sampling.repetition_penalty != 1.0:
            self.slots.start_tracking_seen(self.executor.runner.vocabulary_size)
        self.reads_tokens = self.reads_tokens or bool(sampling.stop_texts)
        index = self.submitted
        self.submitted += 1
        group = self.group_for(sampling, request.top_logprobs)
        self.waiting.append(ActiveRequest(index, request, sampling, group))
        return index

    def group_for(self, sampling: Sampling, top_logprobs: int) -> SamplingGroup:
        last = self.waiting[-1] if self.waiting else None
        if last is not None and last.sampling is sampling and last.group.top_logprobs == top_logprobs:
            return last.group
        key = (replace(sampling, max_tokens=0, stop_texts=()), top_logprobs)  # what a captured step depends on
        if key not in self.groups:
            assert self.mixed or not self.groups, "a captured step samples in one way"
            if len(self.groups) >= MAX_GROUPS:  # most belong to users who left long ago
                self.groups.clear()
            self.groups[key] = SamplingGroup(*key)
        return self.groups[key]

    def cancel(self, index: int) -> None:
        """Remove a request and free its slot; nothing happens if it is finished or unknown."""
        self.waiting = deque(request for request in self.waiting if request.index != index)
        for slot in [slot for slot, request in self.active.items() if request.index == index]:
            self.slots.done[slot] = True
            del self.active[slot]
            self.compact()

    def step(self) -> dict[int, Sample]:
        """Run all three parts; returns the samples of finished requests by number."""
        self.start_step()
        self.check()
        return self.collect()

    # Launching work

    def start_step(self) -> None:
        """Admit waiting requests, or decode a few tokens of the active ones."""
        free = self.cache.slots - len(self.active)
        if self.waiting and free >= min(self.min_prefill, len(self.waiting)):
            self.admit()
        elif self.active:
            self.decode()
        if self.active:
            newest = self.steps_per_check if self.reads_tokens else 0
            summary = HostCopy.start(self.slots.summary(max(self.active) + 1, newest))
            self.snapshots.append(StepSnapshot(dict(self.active), summary, self.version))

    def admit(self) -> None:
        """Move requests into free slots and run their prompts; equal prompts of neighbours run once."""
        free = [slot for slot in range(self.cache.slots) if slot not in self.active]
        chosen: list[ActiveRequest] = []
        budget = self.admit_tokens
        while self.waiting and len(chosen) < len(free):
            prompt = self.waiting[0].request.prompt
            if not chosen or not np.array_equal(chosen[-1].request.prompt, prompt):
                if chosen and len(prompt) > budget:
                    break
                budget -= len(prompt)
            chosen.append(self.waiting.popleft())
        chosen.sort(key=lambda active: len(active.request.prompt))  # neighbours attend together: reference.RowBlock
        admitted = dict(zip(free, chosen, strict=False))
        for slot, active in admitted.items():
            active.slot, active.version = slot, self.version
            active.last_step = self.steps - 1 + active.sampling.max_tokens
        longest = max(active.max_length for active in chosen)
        if longest > self.cache.capacity:
            self.cache.grow(max(round_length(longest, self.device), 2 * self.cache.capacity))
        hidden = torch.cat([self.executor.prefill(prompts) for prompts in self.prefill_batches(admitted)])
        requests = [active.request for active in chosen]
        rows = self.slots.admit(list(admitted), [r.prompt.tolist() for r in requests], [r.seed for r in requests])
        self.sample(rows, self.executor.logits(hidden), chosen)
        self.active |= admitted

    def prefill_batches(self, admitted: dict[int, ActiveRequest]) -> Iterator[list[SharedPrompt]]:
        """Divide prompts into batches of at most `prefill_tokens`; each prompt comes with the slots that share it."""
        batch: list[SharedPrompt] = []
        tokens = 0
        for slot, active in admitted.items():
            prompt = active.request.prompt
            if batch and np.array_equal(batch[-1][0], prompt):
                batch[-1][1].append(slot)
                continue
            if batch and tokens + len(prompt) > self.prefill_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append((prompt, [slot]))
            tokens += len(prompt)
        yield batch

    def decode(self) -> None:
        """Run decode steps until a request reaches max_tokens, at most `steps_per_check`."""
        executor = self.executor
        count = min(executor.step_size(max(self.active) + 1), self.cache.slots)
        remaining = [active.last_step - self.steps for active in self.active.values()]
        left = min((steps for steps in remaining if steps > 0), default=0)  # the next check finds the others finished
        rows, graphs, capacity = self.slots.index[:count], executor.graphs, self.cache.capacity
        if self.mixed:  # sampling is not captured: it may differ per row and per step
            logits = executor.decode(count, self.longest) if graphs is None else executor.decode_captured(count)
            self.sample(rows, logits, [self.active.get(slot) for slot in range(count)])
            self.steps += 1
            return
        (group,) = self.groups.values()
        sampling, sampler = group.sampling, self.sampler
        for _ in range(min(self.steps_per_check, left)):
            if graphs is None:
                sampler.sample(rows, executor.decode(count, self.longest), sampling)
            else:  # everything is on the device, so that the step can be captured
                graphs.run((count, sampling), lambda: sampler.sample(rows, executor.decode(count, capacity), sampling))
            self.steps += 1

    @property
    def longest(self) -> int:
        """Upper bound of the positions of the longest active sequence."""
        return max(active.max_length - max(0, active.last_step - self.steps) for active in self.active.values())

    def sample(self, rows: torch.Tensor, logits: torch.Tensor, requests: Sequence[ActiveRequest | None]) -> None:
        """Sample the next token of each row that has a request."""
        groups: dict[SamplingGroup, list[int]] = {}
        for index, active in enumerate(requests):
            if active is not None:
                groups.setdefault(active.group, []).append(index)
        for index, top_logprobs in self.sampler.sample_groups(rows, logits, groups).items():
            active = requests[index]
            assert active is not None
            active.top_logprobs.append(top_logprobs)

    # Reading results

    def check(self) -> None:
        """Read which requests are finished."""
        while len(self.snapshots) > self.unchecked_steps:
            self.check_snapshot(self.snapshots.popleft())

    def check_snapshot(self, snapshot: StepSnapshot) -> None:
        newest = self.slots.newest_logprobs(max(self.active) + 1) if self.mixed else []
        finished: dict[int, bool] = {}  # slot -> whether a stop text ended it
        (summary,) = snapshot.summary.wait()
        rows, slots = summary.tolist(), iter(snapshot.active)
        if not self.reads_tokens:  # only finished requests matter
            slots = (slot for slot in summary[:, 0].nonzero()[:, 0].tolist() if slot in snapshot.active)
        for slot in slots:
            active, (done, length, *tokens) = snapshot.active[slot], rows[slot]
            if length == active.length or active.slot == NO_SLOT:  # not advanced, or known to be finished
                continue
            stopped = self.reads_tokens and self.read_tokens(active, tokens[active.length - length :])
            active.length = len(active.tokens) if self.reads_tokens else length
            if self.mixed:
                active.logprobs.append(newest[slot])
            if done or stopped or length >= active.sampling.max_tokens:
                finished[active.slot] = stopped
            if self.on_new_token is not None:
                self.on_new_token(active)
        if finished:
            self.finish(finished, snapshot.version)
            self.compact()

    def read_tokens(self, active: ActiveRequest, tokens: list[int]) -> bool:
        """Append new tokens, up to the one that completes a stop text; returns whether one does."""
        texts = active.sampling.stop_texts
        for token in tokens:
            active.tokens.append(token)
            if texts and self.stop_text.matches(texts, active.tokens):
                return True
        return False

    def finish(self, finished: dict[int, bool], version: WeightVersion) -> None:
        """Free the slots of finished requests and start to copy their tokens, before others overwrite them."""
        rows = copy_to_device(torch.tensor(list(finished)), self.device)
        self.slots.done[rows] = True
        requests = [self.active.pop(slot) for slot in finished]
        longest = max(active.length for active in requests)
        for active in requests:
            active.slot = NO_SLOT
        outputs = HostCopy.start(self.slots.tokens[rows, :longest], self.slots.logprobs[rows, :longest])
        self.finished.append(FinishedRequests(requests, list(finished.values()), outputs, version))

    def collect(self) -> dict[int, Sample]:
        """Build the samples of the requests that the last checks found finished, by number."""
        samples: dict[int, Sample] = {}
        for group in self.finished:
            tokens, logprobs = (stream.numpy() for stream in group.outputs.wait())
            tokens = tokens.astype(np.int32)
            for row, (active, stopped) in enumerate(zip(group.requests, group.stopped_by_text, strict=True)):
                own_tokens, own_logprobs = tokens[row, : active.length], logprobs[row, : active.length]
                finish = "stop" if stopped or int(own_tokens[-1]) in active.sampling.stop_ids else "length"
                samples[active.index] = build_sample(active, own_tokens, own_logprobs, finish, group.version)
        self.finished = []
        return samples

    def compact(self) -> None:
        """Move the sequences of the last slots into gaps, if a step then computes fewer slots."""
        size = self.executor.step_size(len(self.active)) if self.active else 0
        late = sorted(slot for slot in self.active if slot >= size)
        if not late or self.executor.step_size(late[-1] + 1) == size:
            return
        gaps = [slot for slot in range(size) if slot not in self.active][: len(late)]
        sources, targets = copy_to_device(torch.tensor([late, gaps]), self.device)
        self.executor.move(sources, targets, self.longest)
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
    )
