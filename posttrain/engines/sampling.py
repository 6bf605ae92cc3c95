"""Samples the next token of many sequences at once, each with its own settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from posttrain.core import ops
from posttrain.core.devices import copy_to_device
from posttrain.engines.base import Constraint, Sampling
from posttrain.engines.kv_cache import decode_kernels_for
from posttrain.engines.slot_state import SlotState

TopLogprobs = list[tuple[int, float]]
"""The most likely tokens at one position with their log-probabilities, in descending order."""


@dataclass(slots=True, eq=False)
class SamplingGroup:
    """Requests that are sampled in the same way, so that one operation serves them all."""

    sampling: Sampling
    top_logprobs: int

    @property
    def is_special(self) -> bool:
        """Whether more is needed than division by the temperature and a random draw."""
        sampling = self.sampling
        truncates = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p
        greedy, penalized = sampling.temperature == 0.0, sampling.repetition_penalty != 1.0
        return bool(truncates or self.top_logprobs or greedy or penalized)


class TokenSampler:
    """Samples tokens from logits and records them in the slots. A random number depends on (seed, token index) only."""

    def __init__(self, slots: SlotState) -> None:
        self.slots = slots
        self.draw = decode_kernels_for(slots.device).draw

    def sample(self, rows: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> None:
        """Sample the next token of each row with the same settings.

        If there are several logits per row, they are those of the first tokens of its draft as well, and all tokens are
        sampled that one step after another would give: see SlotState.record_drafted.
        """
        logits = self.penalize(rows, logits, sampling)
        if sampling.temperature == 0.0:
            logits = ops.tempered(logits.float(), 1.0, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens = logits.argmax(-1)
            logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        else:
            least, temperature = None, sampling.temperature
            if sampling.top_k or sampling.top_p < 1.0 or sampling.min_p:
                logits, temperature = logits.float() / temperature, 1.0
                least = ops.least_kept(logits, sampling.top_k, sampling.top_p, sampling.min_p)
            tokens, logprobs = self.draw(logits, temperature, least, *self.random_streams(rows, len(logits)))
        self.record(rows, tokens, logprobs, sampling.stop_ids)

    def random_streams(self, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the seed and the token index of each of `count` logits."""
        seeds, lengths, per_row = self.slots.seed[rows], self.slots.length[rows], count // len(rows)
        if per_row == 1:
            return seeds, lengths
        ahead = torch.arange(per_row, device=self.slots.device)
        return seeds.repeat_interleave(per_row), (lengths[:, None] + ahead).view(-1)

    def record(
        self, rows: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, stop_ids: tuple[int, ...]
    ) -> None:
        """Record what was sampled, one token per row or several."""
        stops = self.slots.stop_tensor(stop_ids)
        if len(tokens) == len(rows):
            self.slots.record(rows, tokens, logprobs, stops)
        else:
            self.slots.record_drafted(rows, tokens.view(len(rows), -1), logprobs.view(len(rows), -1), stops)

    def sample_groups(
        self, rows: torch.Tensor, logits: torch.Tensor, groups: dict[SamplingGroup, list[int]]
    ) -> dict[int, TopLogprobs]:
        """Sample the next token of the rows in groups, in one draw; returns top log-probabilities by row index.

        `groups`: indices into `rows`. Rows in no group are not recorded. With several logits per row as in `sample`;
        top log-probabilities are of the first token.
        """
        if len(groups) == 1 and not any(group.top_logprobs for group in groups):
            (group,) = groups
            self.sample(rows, logits, group.sampling)
            return {}
        device, per_row = self.slots.device, len(logits) // len(rows)

        def places(indices: list[int]) -> torch.Tensor:  # of logits
            first = torch.tensor(indices, device=device)
            return (first[:, None] * per_row + torch.arange(per_row, device=device)).view(-1)

        temperature = [1.0] * len(rows)
        for group, indices in groups.items():
            for index in indices:
                temperature[index] = group.sampling.temperature or 1.0
        special = {group: places(indices) for group, indices in groups.items() if group.is_special}
        logits = logits.float()
        for group, at in special.items():
            if group.sampling.repetition_penalty != 1.0:
                own = rows[torch.tensor(groups[group], device=device)]
                logits[at] = self.penalize(own, logits[at], group.sampling)
        logits = logits / torch.tensor(temperature, device=device).repeat_interleave(per_row)[:, None]
        least = logits.new_full((len(logits), 1), -torch.inf)
        for group, at in special.items():
            floor = ops.least_kept(logits[at], group.sampling.top_k, group.sampling.top_p, group.sampling.min_p)
            if floor is not None:
                least[at] = floor
        tokens, logprobs = self.draw(logits, 1.0, least, *self.random_streams(rows, len(logits)))
        top: dict[int, TopLogprobs] = {}
        for group, at in special.items():
            distribution = logits[at].masked_fill(logits[at] < least[at], -torch.inf).log_softmax(-1)
            if group.sampling.temperature == 0.0:
                logprobs[at], tokens[at] = distribution.max(-1)
            if group.top_logprobs:
                first = distribution[::per_row]
                top |= zip(groups[group], top_logprobs(first, group.top_logprobs), strict=True)
        by_stop_ids: dict[tuple[int, ...], list[int]] = {}
        for group, indices in groups.items():
            by_stop_ids.setdefault(group.sampling.stop_ids, []).extend(indices)
        for stop_ids, indices in by_stop_ids.items():
            at = places(indices)
            self.record(rows[torch.tensor(indices, device=device)], tokens[at], logprobs[at], stop_ids)
        return top

    def penalize(self, rows: torch.Tensor, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        """Apply the repetition penalty to tokens of prompt and completion."""
        if sampling.repetition_penalty == 1.0:
            return logits
        penalty = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        return torch.where(self.slots.seen_before(rows, len(logits) // len(rows)), logits * penalty, logits)


def constrain(logits: torch.Tensor, constraints: dict[int, Constraint]) -> torch.Tensor:
    """Return logits in which the tokens that a row's constraint does not allow are impossible."""
    vocabulary = logits.shape[1]
    words = np.zeros((len(constraints), -(-vocabulary // 32)), dtype=np.int32)
    for row, constraint in zip(words, constraints.values(), strict=True):
        constraint.fill_mask(row)
    bits = copy_to_device(torch.from_numpy(words), logits.device)
    places = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((bits[:, :, None] >> places) & 1).flatten(1)[:, :vocabulary].bool()
    rows = copy_to_device(torch.tensor(list(constraints)), logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))


def top_logprobs(distribution: torch.Tensor, count: int) -> list[TopLogprobs]:
    """Return the `count` most likely tokens of each row of log-probabilities; impossible tokens are left out."""
    best = distribution.topk(min(count, distribution.shape[1]))
    rows = torch.stack([best.indices.double(), best.values.double()], -1).tolist()
    return [[(int(token), logprob) for token, logprob in row if logprob > -torch.inf] for row in rows]
