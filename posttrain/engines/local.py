"""The engine that needs no second copy of the weights: it runs the trainer's own module, with a cache of ours.

Sequences live in slots. A finished one gives its slot to the next request at once; when none is left, the last slot
moves into the gap, so that a step always computes the sequences under way and nothing else. Every random number comes
from a request's own seed and the token's place, so an answer does not depend on its company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from posttrain import ops
from posttrain.data.pack import collate
from posttrain.engines.base import OnToken, Request, Sampling
from posttrain.models.attention import plain_attention
from posttrain.models.forward import Trunk
from posttrain.types import Sample

GROWTH = 64  # positions by which the cache grows
PREFILL_TOKENS = 8192


@dataclass(slots=True)
class Answer:
    """A request under way."""

    index: int  # among the requests
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


class LocalEngine:
    """Continuous batching over a Hugging Face module."""

    def __init__(self, trunk: Trunk, tokenizer: Any, *, slots: int = 64) -> None:
        self.trunk = trunk
        self.tokenizer = tokenizer
        self.slots = slots
        self.device = next(trunk.model.parameters()).device

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Sample]:
        """One sample a request, in order. Tokens, log-probabilities and mask cover prompt and answer."""
        was_training = self.trunk.model.training
        self.trunk.model.eval()
        waiting = deque(Answer(index, request) for index, request in enumerate(requests))
        done: dict[int, Sample] = {}
        cache = SlotCache(self.slots, self.device)
        active: list[Answer] = []
        while waiting or active:
            if waiting and len(active) < self.slots:
                logits = self.admit(waiting, active, cache)
                newcomers = active[len(active) - len(logits) :]
            else:
                logits = self.step(active, cache)
                newcomers = active
            self.choose(newcomers, logits, sampling, on_token)
            for slot in reversed(range(len(active))):
                if active[slot].finish:
                    done[active[slot].index] = self.finished(active[slot])
                    cache.free(slot, len(active) - 1)
                    active[slot] = active[-1]
                    active.pop()
        self.trunk.model.train(was_training)
        return [done[index] for index in range(len(requests))]

    def admit(self, waiting: deque[Answer], active: list[Answer], cache: SlotCache) -> torch.Tensor:
        """Move requests into free slots and run their prompts, each different prompt of neighbours once."""
        newcomers: list[Answer] = []
        prompts: list[Sample] = []
        sharing: list[list[int]] = []  # slots of each prompt
        room = PREFILL_TOKENS
        while waiting and len(active) + len(newcomers) < self.slots:
            request = waiting[0].request
            if prompts and np.array_equal(prompts[-1].tokens, request.prompt):
                sharing[-1].append(len(active) + len(newcomers))
            else:
                if prompts and len(request.prompt) > room:
                    break
                room -= len(request.prompt)
                prompts.append(Sample(tokens=request.prompt, mask=np.zeros(len(request.prompt), dtype=np.bool_)))
                sharing.append([len(active) + len(newcomers)])
            newcomers.append(waiting.popleft())
        batch = collate(prompts, self.device)
        cache.prefill(batch.lengths, sharing)
        hidden = self.trunk.hidden(batch, cache=cache).last_hidden_state[0]
        logits = self.trunk.logits(hidden[batch.starts[1:].long() - 1])
        active += newcomers
        repeats = torch.tensor([len(slots) for slots in sharing], device=self.device)
        return logits.repeat_interleave(repeats, 0)

    def step(self, active: list[Answer], cache: SlotCache) -> torch.Tensor:
        """Run the newest token of every sequence under way; logits of the next: [sequences, V]."""
        tokens = torch.tensor([sequence.tokens[-1] for sequence in active], device=self.device)
        positions = cache.begin_step(len(active))
        layers = getattr(self.trunk.model, self.trunk.model.base_model_prefix)
        out = layers(input_ids=tokens[None], position_ids=positions[None], use_cache=False, cache=cache)
        return self.trunk.logits(out.last_hidden_state[0])

    def choose(
        self, sequences: list[Answer], logits: torch.Tensor, sampling: Sampling, on_token: OnToken | None
    ) -> None:
        """Draw the next token of each sequence and see whether it ends there."""
        if sampling.repetition_penalty != 1.0:
            logits = self.penalized(sequences, logits, sampling.repetition_penalty)
        logits = ops.tempered(logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        logprobs = logits.log_softmax(-1)
        if sampling.temperature == 0.0:
            chosen = logits.argmax(-1)
        else:
            places = [len(sequence.tokens) for sequence in sequences]
            draws = uniforms([sequence.request.seed for sequence in sequences], places).to(self.device)
            chosen = inverse_cdf(logprobs, draws)
        picked = logprobs.gather(-1, chosen[:, None])[:, 0]
        for sequence, token, logprob in zip(sequences, chosen.tolist(), picked.tolist(), strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if token in sampling.stop_ids or self.says_stop(sequence, sampling):
                sequence.finish = "stop"
            elif len(sequence.tokens) >= sampling.max_tokens:
                sequence.finish = "length"
            if on_token is not None:
                on_token(sequence.index, token)

    def says_stop(self, sequence: Answer, sampling: Sampling) -> bool:
        """Whether a stop text is complete with the newest token."""
        if not sampling.stop_texts:
            return False
        longest = max(len(text) for text in sampling.stop_texts)
        tail = self.tokenizer.decode(sequence.tokens[-(longest + 8) :])  # a token has at least one byte, most have more
        return any(text in tail for text in sampling.stop_texts)

    def penalized(self, sequences: list[Answer], logits: torch.Tensor, penalty: float) -> torch.Tensor:
        """Tokens that were there before: a positive score is divided by the penalty, a negative one multiplied."""
        logits = logits.clone()
        for row, sequence in enumerate(sequences):
            seen = torch.tensor([*sequence.request.prompt.tolist(), *sequence.tokens], device=logits.device).unique()
            scores = logits[row, seen]
            logits[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        return logits

    def finished(self, sequence: Answer) -> Sample:
        prompt = sequence.request.prompt
        return Sample(
            tokens=np.concatenate([prompt, np.array(sequence.tokens, dtype=np.int32)]),
            mask=np.arange(len(prompt) + len(sequence.tokens)) >= len(prompt),
            logprobs=np.concatenate([np.zeros(len(prompt)), sequence.logprobs]).astype(np.float32),
            group=sequence.request.group,
            finish=sequence.finish,
        )


class SlotCache:
    """Keys and values: for each layer [slots, kv_heads, positions, d], grown as sequences do."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots, self.device = slots, device
        self.decoding = False
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.longest = 0
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.sharing: list[list[int]] = []
        self.parts: tuple[int, ...] = ()
        self.active = 0

    def prefill(self, lengths: Sequence[int], sharing: list[list[int]]) -> None:
        """The next forward pass runs prompts of these lengths, each for the slots that share it."""
        self.decoding = False
        self.parts, self.sharing = tuple(lengths), sharing
        for length, slots in zip(lengths, sharing, strict=True):
            self.lengths[slots] = length
        self.longest = max(self.longest, *lengths)

    def keep(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for store, stream in ((self.keys, key), (self.values, value)):
            room = self.with_room(store, layer, stream, self.longest + 1)
            parts = stream[0].split(self.parts, dim=1)  # [kv_heads, n, d] each
            for part, slots in zip(parts, self.sharing, strict=True):
                room[slots, :, : part.shape[1]] = part

    def with_room(self, store: dict[int, torch.Tensor], layer: int, like: torch.Tensor, positions: int) -> torch.Tensor:
        held = store.get(layer)
        if held is None or held.shape[2] < positions:
            size = -(-positions // GROWTH) * GROWTH
            wider = like.new_zeros(self.slots, like.shape[1], size, like.shape[3])
            if held is not None:
                wider[:, :, : held.shape[2]] = held
            store[layer] = wider
        return store[layer]

    def begin_step(self, active: int) -> torch.Tensor:
        """The next forward pass runs one token in each of the first `active` slots; its positions."""
        self.decoding = True
        self.active = active
        positions = self.lengths[:active].clone()
        self.lengths[:active] += 1
        self.longest = int(self.lengths[:active].max())
        seen = torch.arange(self.longest, device=self.device)
        self.distance = positions[:, None] - seen  # how far back each key lies: [active, longest]
        return positions

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [1, heads, active, d]
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        keys = self.with_room(self.keys, layer, key, self.longest)
        values = self.with_room(self.values, layer, value, self.longest)
        rows, positions = torch.arange(self.active, device=self.device), self.lengths[: self.active] - 1
        keys[rows, :, positions] = key[0].transpose(0, 1)
        values[rows, :, positions] = value[0].transpose(0, 1)
        k, v = keys[: self.active, :, : self.longest], values[: self.active, :, : self.longest]
        heads, kv_heads = query.shape[1], k.shape[1]
        # The query heads of one key head become rows of one short query: each key is read once.
        q = query[0].transpose(0, 1).reshape(self.active, kv_heads, heads // kv_heads, query.shape[3])
        visible = self.distance >= 0
        if sliding_window is not None:
            visible = visible & (self.distance < sliding_window)
        mask = visible[:, None, None, :]
        if softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            out = plain_attention(q, k, v, mask, scaling, softcap, sinks)
        return out.reshape(1, self.active, heads, v.shape[3])

    def free(self, slot: int, last: int) -> None:
        """A sequence has ended: the last one moves into its slot."""
        if slot == last:
            return
        length = int(self.lengths[last])
        for store in (self.keys, self.values):
            for held in store.values():
                held[slot, :, :length] = held[last, :, :length]
        self.lengths[slot] = self.lengths[last]


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> torch.Tensor:
    """A number in [0, 1) for each (seed, place), the same whoever else is asked for: splitmix64."""
    with np.errstate(over="ignore"):
        x = np.array(seeds, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.array(places, dtype=np.uint64)
        for _ in range(2):  # twice: neighbouring seeds and places must not resemble each other
            x = x + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return torch.from_numpy((x >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def inverse_cdf(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative probability passes the draw: [n, V], [n] -> [n]."""
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    reached = torch.minimum(draws[:, None] * total, total.nextafter(torch.zeros_like(total)))  # a product may round up
    return torch.searchsorted(cumulative, reached, right=True)[:, 0]
