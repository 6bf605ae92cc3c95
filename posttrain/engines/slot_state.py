"""The state of active sequences on the device. Decode steps read and write it there; the host copies it later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from posttrain.core.devices import copy_to_device
from posttrain.core.types import Floats, Ints
from posttrain.engines.kv_cache import lazy_zeros

NO_DRAFT = -1
"""Equal to no token: what is sampled after it is not recorded."""


class SlotState:
    """One row per slot. `length` counts the tokens of the completion; the last of them has not been computed yet."""

    def __init__(self, count: int, max_tokens: int, device: torch.device, draft_tokens: int = 0) -> None:
        """`max_tokens`: of a completion; `draft_tokens`: most that are computed in one step beyond the last token."""
        self.count, self.max_tokens, self.device = count, max_tokens, device
        self.index = torch.arange(count, device=device)
        self.last_token = torch.zeros_like(self.index)
        self.prompt_length = torch.zeros_like(self.index)
        self.length = torch.ones_like(self.index)
        self.seed = torch.zeros_like(self.index)
        self.adapter = torch.zeros_like(self.index)  # number; 0: none
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.limit = torch.zeros(count, dtype=torch.long, device=device)  # most tokens of a completion
        # The last column takes what finished sequences write.
        self.tokens = lazy_zeros((count, max_tokens + 1), torch.long, device)
        self.logprobs = lazy_zeros((count, max_tokens + 1), torch.float32, device)
        self.drafts = torch.full((count, draft_tokens), NO_DRAFT, device=device)  # of the next step
        self.track_seen = False
        self.true = torch.ones((), dtype=torch.bool, device=device)  # a CUDA graph cannot copy one from the host
        self.seen: torch.Tensor | None = None  # [count, V]: tokens of prompt and completion, for repetition penalties
        self.stop_tensors: dict[tuple[int, ...], torch.Tensor] = {}

    def reset(self, limit: int, penalized_vocabulary: int | None) -> None:
        """Free all slots; completions have at most `limit` tokens. With a vocabulary, seen tokens are tracked."""
        self.limit.fill_(limit)
        self.length.fill_(1)
        self.prompt_length.zero_()
        self.done.fill_(True)
        self.track_seen = False
        if penalized_vocabulary is not None:
            self.start_tracking_seen(penalized_vocabulary)

    def start_tracking_seen(self, vocabulary: int) -> None:
        self.track_seen = True
        if self.seen is None:
            self.seen = torch.zeros(self.count, vocabulary, dtype=torch.bool, device=self.device)

    def stop_tensor(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Return stop ids as a tensor, at the same address every time: CUDA graphs refer to it."""
        if ids not in self.stop_tensors:
            self.stop_tensors[ids] = torch.tensor(ids, dtype=torch.long, device=self.device)
        return self.stop_tensors[ids]

    def admit(
        self,
        slots: Sequence[int],
        prompts: Sequence[Ints],
        seeds: Sequence[int],
        begun: Sequence[tuple[Ints, Floats]],
        adapters: Sequence[int],
        limits: Sequence[int],
    ) -> torch.Tensor:
        """Start sequences in these slots; returns the slots as a tensor.

        `begun`: tokens and log-probabilities of each completion so far; none, unless it was preempted or cut off.
        `adapters`: the number of each sequence's; `limits`: most tokens of each completion.
        """
        lengths = [len(tokens) for tokens, _ in begun]
        signed = [as_signed(seed) for seed in seeds]
        prompt_lengths = [len(prompt) for prompt in prompts]
        table = torch.tensor([list(slots), prompt_lengths, signed, lengths, list(adapters), list(limits)])
        rows, prompt_length, seed, length, adapter, limit = copy_to_device(table, self.device)
        self.limit[rows] = limit
        self.prompt_length[rows], self.seed[rows], self.adapter[rows] = prompt_length, seed, adapter
        self.length[rows], self.done[rows] = length, False
        for slot, (tokens, logprobs) in zip(slots, begun, strict=True):
            if len(tokens):
                self.tokens[slot, : len(tokens)] = torch.as_tensor(tokens, dtype=torch.long, device=self.device)
                self.logprobs[slot, : len(tokens)] = torch.as_tensor(logprobs, device=self.device)
        if self.track_seen:
            assert self.seen is not None
            self.seen[rows] = False
            for row, prompt, (tokens, _) in zip(slots, prompts, begun, strict=True):
                known = np.concatenate([prompt, tokens])
                self.seen[row, torch.as_tensor(known, dtype=torch.long, device=self.device)] = True
        return rows

    def release(self, rows: torch.Tensor) -> None:
        """Free slots. A decode step that includes them computes one position."""
        self.done[rows] = True
        self.prompt_length[rows], self.length[rows] = 0, 1

    def completion(self, slot: int) -> tuple[Ints, Floats]:
        """Return the tokens and log-probabilities of a completion so far; waits for the device."""
        length = int(self.length[slot])
        tokens = self.tokens[slot, :length].cpu().numpy().astype(np.int32)
        return tokens, self.logprobs[slot, :length].cpu().numpy().copy()

    def positions(self, count: int) -> torch.Tensor:
        """Return the positions of the last tokens of the first `count` slots."""
        return self.prompt_length[:count] + self.length[:count] - 1

    def set_drafts(self, drafts: Mapping[int, Sequence[int]], count: int) -> None:
        """Set the drafts of the first `count` slots, by slot."""
        table = np.full((count, self.drafts.shape[1]), NO_DRAFT)
        for slot, draft in drafts.items():
            table[slot, : len(draft)] = draft
        self.drafts[:count] = copy_to_device(torch.from_numpy(table), self.device)

    def inputs(self, count: int, drafted: int) -> torch.Tensor:
        """Return the last token of each of the first slots, followed by the first `drafted` tokens of its draft."""
        last = self.last_token[:count]
        if not drafted:
            return last
        return torch.cat([last[:, None], self.drafts[:count, :drafted].clamp(min=0)], 1).view(-1)

    def seen_before(self, rows: torch.Tensor, per_row: int) -> torch.Tensor:
        """Return the tokens before each of the next `per_row` tokens of a row, its draft included: [n * per_row, V]."""
        assert self.seen is not None
        seen = self.seen[rows]
        if per_row == 1:
            return seen
        seen = seen.repeat_interleave(per_row, 0)
        by_row = seen.view(len(rows), per_row, -1)
        for i in range(per_row - 1):
            draft = self.drafts[rows, i].clamp(min=0)[:, None, None]
            by_row[:, i + 1 :].scatter_(2, draft.expand(-1, per_row - 1 - i, 1), True)
        return seen

    def record(self, rows: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, stops: torch.Tensor) -> None:
        """Append sampled tokens. A finished sequence stays as it is."""
        length, done = self.length[rows], self.done[rows]
        column = torch.where(done, self.max_tokens, length)
        self.tokens[rows, column] = tokens
        self.logprobs[rows, column] = logprobs
        length = length + (~done).long()
        self.length[rows], self.last_token[rows] = length, tokens
        self.done[rows] = done | (length >= self.limit[rows]) | (tokens[:, None] == stops).any(1)
        if self.track_seen:
            assert self.seen is not None
            self.seen[rows, tokens] = self.true

    def record_drafted(
        self, rows: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, stops: torch.Tensor
    ) -> None:
        """Append what sampling one token at a time would have; tokens and log-probabilities are [n, 1 + drafted].

        The i-th was sampled after the first i tokens of the draft. It counts if those are the tokens that were sampled
        before it, and none of them ended the sequence.
        """
        length, drafted = self.length[rows], tokens.shape[1] - 1
        lengths = length[:, None] + torch.arange(1, drafted + 2, device=self.device)  # with each token
        ends = (lengths >= self.limit[rows, None]) | (tokens[:, :, None] == stops).any(2)
        agrees = (tokens[:, :-1] == self.drafts[rows, :drafted]) & ~ends[:, :-1]
        counts = torch.cat([~self.done[rows, None], agrees], 1).long().cumprod(1).bool()
        column = torch.where(counts, lengths - 1, self.max_tokens)
        self.tokens[rows[:, None], column] = tokens
        self.logprobs[rows[:, None], column] = logprobs
        new = counts.sum(1)
        last = tokens.gather(1, (new - 1).clamp(min=0)[:, None])
        self.length[rows], self.last_token[rows] = length + new, last[:, 0]
        self.done[rows] = self.done[rows] | (counts & ends).any(1)
        if self.track_seen:
            assert self.seen is not None
            self.seen[rows[:, None], torch.where(counts, tokens, last)] = self.true

    def summary(self, count: int, newest: int) -> torch.Tensor:
        """Return [1 if done, length, newest tokens] of the first slots; short sequences repeat their first token."""
        recent = self.tokens[:count].gather(1, self.newest_columns(count, newest))
        return torch.cat([self.done[:count, None].long(), self.length[:count, None], recent], 1)

    def newest_logprobs(self, count: int, newest: int) -> torch.Tensor:
        """Return the log-probabilities of the newest tokens of the first slots, as `summary` has the tokens."""
        return self.logprobs[:count].gather(1, self.newest_columns(count, newest))

    def newest_columns(self, count: int, newest: int) -> torch.Tensor:
        return (self.length[:count, None] + torch.arange(-newest, 0, device=self.device)).clamp(min=0)

    def move(self, sources: torch.Tensor, targets: torch.Tensor, longest: int) -> None:
        """Move sequences whose completions have at most `longest` tokens; the slots that they leave are free."""
        small = (
            self.last_token,
            self.prompt_length,
            self.length,
            self.seed,
            self.adapter,
            self.done,
            self.seen,
            self.limit,
        )
        for stream in (*small, self.tokens[:, :longest], self.logprobs[:, :longest]):
            if stream is not None:
                stream.index_copy_(0, targets, stream.index_select(0, sources))
        self.release(sources)


def as_signed(seed: int) -> int:
    """Return the same 64 bits as a signed integer."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
