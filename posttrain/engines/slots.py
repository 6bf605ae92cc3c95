"""What is known of the sequences under way, on the device: a step reads and writes it there, the host looks later."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from posttrain.core.devices import copy_to_device


class Slots:
    """One row a sequence. `place` counts the answer's tokens; the newest one has yet to run through the model."""

    def __init__(self, count: int, answer: int, device: torch.device) -> None:
        self.count, self.answer, self.device = count, answer, device
        self.index = torch.arange(count, device=device)
        self.token = torch.zeros_like(self.index)
        self.start = torch.zeros_like(self.index)  # length of the prompt
        self.place = torch.ones_like(self.index)
        self.seed = torch.zeros_like(self.index)
        self.done = torch.ones(count, dtype=torch.bool, device=device)
        self.limit = torch.zeros(1, dtype=torch.long, device=device)
        self.answers = torch.zeros(
            count, answer + 1, dtype=torch.long, device=device
        )  # the last column is for the done
        self.logprobs = torch.zeros(count, answer + 1, device=device)
        self.noting = False
        self.yes = torch.ones((), dtype=torch.bool, device=device)  # a graph cannot fetch one from the host
        self.seen: torch.Tensor | None = None  # [count, V]: tokens to be penalized
        self.stops: dict[tuple[int, ...], torch.Tensor] = {}

    def begin(self, limit: int, vocabulary: int | None) -> None:
        """All slots are free; answers have at most `limit` tokens. With a vocabulary, tokens that occur are noted."""
        self.limit.fill_(limit)
        self.place.fill_(1)
        self.start.zero_()
        self.done.fill_(True)
        self.noting = False
        if vocabulary is not None:
            self.note(vocabulary)

    def note(self, vocabulary: int) -> None:
        """From now on tokens that occur are noted."""
        self.noting = True
        if self.seen is None:
            self.seen = torch.zeros(self.count, vocabulary, dtype=torch.bool, device=self.device)

    def stops_of(self, ids: tuple[int, ...]) -> torch.Tensor:
        """Tokens that end an answer, at one address for each choice of them."""
        if ids not in self.stops:
            self.stops[ids] = torch.tensor(ids, dtype=torch.long, device=self.device)
        return self.stops[ids]

    def admit(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> torch.Tensor:
        """Sequences begin in these slots; their rows."""
        table = torch.tensor([list(slots), [len(prompt) for prompt in prompts], [signed(seed) for seed in seeds]])
        rows, start, seed = copy_to_device(table, self.device)
        self.start[rows], self.seed[rows] = start, seed
        self.place[rows], self.done[rows] = 0, False
        if self.noting:
            assert self.seen is not None
            self.seen[rows] = False
            for row, prompt in zip(slots, prompts, strict=True):
                self.seen[row, torch.as_tensor(prompt, dtype=torch.long, device=self.device)] = True
        return rows

    def positions(self, count: int) -> torch.Tensor:
        """Where the newest tokens of the first slots stand."""
        return self.start[:count] + self.place[:count] - 1

    def record(self, rows: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, stops: torch.Tensor) -> None:
        """These tokens were drawn. A sequence that has ended stays as it is."""
        place, done = self.place[rows], self.done[rows]
        column = torch.where(done, self.answer, place)
        self.answers[rows, column] = tokens
        self.logprobs[rows, column] = logprobs
        place = place + (~done).long()
        self.place[rows], self.token[rows] = place, tokens
        self.done[rows] = done | (place >= self.limit) | (tokens[:, None] == stops).any(1)
        if self.noting:
            assert self.seen is not None
            self.seen[rows, tokens] = self.yes

    def state(self, count: int, newest: int) -> torch.Tensor:
        """[1 if done, place, the newest tokens] of the first slots; what stands before them where there are fewer."""
        place = self.place[:count]
        recent = (place[:, None] + torch.arange(-newest, 0, device=self.device)).clamp(min=0)
        return torch.cat([self.done[:count, None].long(), place[:, None], self.answers[:count].gather(1, recent)], 1)

    def newest_logprobs(self, count: int) -> list[float]:
        """Of the newest token of the first slots."""
        newest = (self.place[:count] - 1).clamp(min=0)[:, None]
        return self.logprobs[:count].gather(1, newest)[:, 0].tolist()

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Sequences change their slots; those that they leave are free."""
        for stream in (
            self.token,
            self.start,
            self.place,
            self.seed,
            self.done,
            self.answers,
            self.logprobs,
            self.seen,
        ):
            if stream is not None:
                stream.index_copy_(0, targets, stream.index_select(0, sources))
        self.done[sources] = True


def signed(seed: int) -> int:
    """The same 64 bits as a signed number."""
    seed %= 2**64
    return seed - 2**64 if seed >= 2**63 else seed
