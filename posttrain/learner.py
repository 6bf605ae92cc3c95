"""The learner: a model and its optimizer on one device. Knows packs, sums and gradients; knows no algorithm by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from posttrain.config import ModelConfig, UpdateConfig
from posttrain.data.pack import collate, pack
from posttrain.data.templates import apply_template, stop_ids
from posttrain.engines.base import Request as Wanted
from posttrain.engines.base import Sampling
from posttrain.engines.local import LocalEngine
from posttrain.errors import UsageError
from posttrain.models import lora
from posttrain.models.checkpoint import load_tensors, save_tensors
from posttrain.models.forward import Trunk, check_router, forward, prove
from posttrain.models.load import load_model, load_tokenizer, load_weights, save_model, trainable_parameters
from posttrain.models.optimizer import Optimizer
from posttrain.types import Batch, Drawing, Floats, Head, Objective, Outputs, Request, Sample

PLAIN = Drawing()
VALUE_HEAD = "value_head.weight"
SHARED_TOKENS = 16  # neighbours with so long a common beginning compute it once
LARGEST = "largest_"
"""Metrics of this prefix are the largest of all packs and ranks, not sums."""

Part = Literal["model", "optimizer"]
Sums = dict[str, tuple[float, float | None]]
"""Metric -> (sum, count); a count of None stands for the objective's own denominator."""


class Learner:
    """`forward_backward` adds gradients, `step` applies them; everything else only looks."""

    def __init__(
        self,
        model: ModelConfig,
        update: UpdateConfig,
        *,
        head: Head = "token",
        trainable: bool = True,
        teacher: ModelConfig | None = None,
        template: str = "",
        value_head: bool = False,
        sampler_copy: bool = False,
        seed: int = 0,
    ) -> None:
        """`value_head`: the model is its own critic; `sampler_copy`: it generates with weights of their own."""
        self.device = default_device()
        self.update = update
        self.model = load_model(model, head, device=self.device, trainable=trainable, seed=seed)
        self.tokenizer = load_tokenizer(model)
        if template:  # saved with the model, so that it is asked, and stops, as it was trained
            apply_template(self.tokenizer, template)
            if head == "token":
                self.model.generation_config.eos_token_id = stop_ids(self.tokenizer)
        self.trunk = Trunk.of(self.model)
        prove(self.trunk)
        if model.router_loss:
            check_router(self.model)
        self.teacher: Trunk | None = None
        if teacher is not None:
            self.teacher = Trunk.of(load_model(teacher, "token", device=self.device, trainable=False, seed=seed))
            prove(self.teacher)
            check_teacher(self.trunk, self.teacher)
        if value_head:
            self.trunk.value_head = new_value_head(self.model, seed)
        self.sampler = Trunk.of(copy.deepcopy(self.model).requires_grad_(False)) if sampler_copy else self.trunk
        self.engines: dict[int, LocalEngine] = {}
        self.optimizer = Optimizer(self.parameters(), update) if trainable else None

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All that is trained, by name."""
        head = self.trunk.value_head
        return trainable_parameters(self.model) | ({VALUE_HEAD: head.weight} if head is not None else {})

    def forward_backward(self, samples: Sequence[Sample], objective: Objective, denominator: int, tokens: int) -> Sums:
        """Add the gradient of (sum of losses) / denominator. `tokens`: of the whole step, for the router's balance."""
        totals = Totals()
        for batch in self.batches(samples, objective.group_size):
            out = forward(self.trunk, batch, objective.request, self.teacher)
            loss = objective.loss(out, batch)
            scaled = loss.total / denominator
            if out.router_loss is not None:
                scaled = scaled + objective.request.router_loss * out.router_loss / tokens
                totals.add("router_balance", out.router_loss, torch.tensor(len(batch.tokens), device=self.device))
            scaled.backward()
            totals.add("loss", loss.total)
            totals.add_all(loss.metrics)
        return totals.read()

    def step(self, learning_rate: float) -> dict[str, float]:
        """Apply and forget the gradients; see Optimizer.step."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        return self.optimizer.step(learning_rate)

    def discard(self) -> dict[str, float]:
        """Forget the gradients instead of applying them."""
        assert self.optimizer is not None, "this learner was loaded for inference"
        self.optimizer.forget_gradients()
        return {"skipped": 1.0}

    @torch.no_grad()
    def evaluate(self, samples: Sequence[Sample], objective: Objective) -> Sums:
        """Loss and metrics without gradients."""
        self.model.eval()
        totals = Totals()
        for batch in self.batches(samples, objective.group_size):
            loss = objective.loss(forward(self.trunk, batch, objective.request, self.teacher), batch)
            totals.add("loss", loss.total)
            totals.add_all(loss.metrics)
        self.model.train()
        return totals.read()

    def logprobs(self, samples: Sequence[Sample], *, adapters: bool = True, drawing: Drawing = PLAIN) -> list[Floats]:
        """Log-probability of each counted token, 0 elsewhere. Without adapters: those of the frozen base model."""
        request = Request(names=frozenset({"logprobs"}), drawing=drawing)
        with nullcontext() if adapters else lora.disabled(self.model):
            return self.streams(samples, request, lambda out: out.logprobs)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """What the critic expects before each counted token, 0 elsewhere."""
        return self.streams(samples, Request(names=frozenset({"values"})), lambda out: out.values)

    def generate(self, requests: Sequence[Wanted], sampling: Sampling, *, current: bool = False) -> list[Sample]:
        """Answers with the sampler's weights, or with the `current` ones: the same, where it has none of its own."""
        trunk = self.trunk if current else self.sampler
        if id(trunk) not in self.engines:
            self.engines[id(trunk)] = LocalEngine(trunk, self.tokenizer)
        return self.engines[id(trunk)].generate(requests, sampling)

    @torch.no_grad()
    def refresh_sampler(self) -> None:
        """Bring the sampler's own weights up to date; where it shares the trainer's there is nothing to do."""
        if self.sampler is self.trunk:
            return
        ours, theirs = self.model.state_dict(), self.sampler.model.state_dict()
        for name, tensor in theirs.items():
            tensor.copy_(ours[name])

    def stop_ids(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and those the model's files name."""
        named = self.model.generation_config.eos_token_id
        return sorted({*stop_ids(self.tokenizer), *(named if isinstance(named, list) else [named])} - {None})

    def score_statistics(self) -> tuple[float, float]:
        """Mean and deviation of a reward model's scores, as saved with it."""
        mean, deviation = (getattr(self.model.config, name, None) for name in ("score_mean", "score_std"))
        if mean is None or not deviation:
            raise UsageError("rewards.normalize_models: the reward model was saved without score_mean and score_std")
        return float(mean), float(deviation)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """The score head's number for each sample."""
        found: dict[int, float] = {}
        for indices, out, _ in self.look(samples, Request(names=frozenset({"scores"}))):
            assert out.scores is not None
            found |= dict(zip(indices, out.scores.tolist(), strict=True))
        return [found[i] for i in range(len(samples))]

    def streams(
        self, samples: Sequence[Sample], request: Request, read: Callable[[Outputs], torch.Tensor | None]
    ) -> list[Floats]:
        found: dict[int, Floats] = {}
        for indices, out, batch in self.look(samples, request):
            stream = read(out)
            assert stream is not None
            parts = np.split(stream.cpu().numpy().astype(np.float32), np.cumsum(batch.lengths)[:-1])
            found |= dict(zip(indices, parts, strict=True))
        return [found[i] for i in range(len(samples))]

    @torch.no_grad()
    def look(self, samples: Sequence[Sample], request: Request) -> list[tuple[list[int], Outputs, Batch]]:
        """Forward passes only: (indices of the samples, outputs, batch) of each pack."""
        self.model.eval()
        seen = []
        for indices in pack(samples, self.update.tokens_per_device, share=self.shared_tokens):
            batch = collate([samples[i] for i in indices], self.device, self.shared_tokens)
            seen.append((indices, forward(self.trunk, batch, request), batch))
        self.model.train()
        return seen

    def batches(self, samples: Sequence[Sample], group_size: int) -> list[Batch]:
        packs = pack(samples, self.update.tokens_per_device, group_size, self.shared_tokens)
        return [collate([samples[i] for i in indices], self.device, self.shared_tokens) for indices in packs]

    @property
    def shared_tokens(self) -> int:
        """How many tokens neighbours must have in common to compute them once; 0: a model here cannot share."""
        able = self.trunk.shares and (self.teacher is None or self.teacher.shares)
        return SHARED_TOKENS if able else 0

    def annotate(self, facts: dict[str, Any]) -> None:
        """Write facts into the model's config, so that they are saved with it."""
        for key, value in facts.items():
            setattr(self.model.config, key, value)

    def save(self, folder: Path) -> None:
        """model/ is a plain Hugging Face folder; beside it what training needs to go on."""
        assert self.optimizer is not None
        save_model(self.model, self.tokenizer, folder / "model")
        save_tensors(folder / "optimizer.safetensors", self.optimizer.state())
        if self.optimizer.average:
            save_tensors(folder / "ema.safetensors", self.optimizer.average)
        if self.trunk.value_head is not None:
            save_tensors(folder / "value-head.safetensors", {VALUE_HEAD: self.trunk.value_head.weight.detach()})

    def load(self, folder: Path) -> None:
        assert self.optimizer is not None
        load_weights(self.model, folder / "model")
        if self.trunk.value_head is not None:
            saved = load_tensors(folder / "value-head.safetensors")[VALUE_HEAD]
            self.trunk.value_head.weight.data.copy_(saved)
        self.optimizer.load_state(load_tensors(folder / "optimizer.safetensors"))
        if self.optimizer.average:
            self.optimizer.load_average(load_tensors(folder / "ema.safetensors"))

    def offload(self, part: Part) -> None:
        """Move a part to host memory until `onload`; on a CPU it is there already."""
        self.move(part, torch.device("cpu"))

    def onload(self, part: Part) -> None:
        self.move(part, self.device)

    def move(self, part: Part, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        if part == "model":
            self.model.to(device)
        if self.optimizer is not None:
            self.optimizer.move(device)


class Totals:
    """Sums of metrics kept on the device until the step is over, so that no pack waits for the host."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | None = None) -> None:
        total = total.detach().double()
        if name.startswith(LARGEST):
            self.sums[name] = torch.maximum(self.sums[name], total) if name in self.sums else total
            self.counts[name] = torch.ones_like(total)
            return
        self.sums[name] = self.sums[name] + total if name in self.sums else total
        if count is not None:
            count = count.detach().double()
            self.counts[name] = self.counts[name] + count if name in self.counts else count

    def add_all(self, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            self.add(name, *value) if isinstance(value, tuple) else self.add(name, value)

    def read(self) -> Sums:
        """To the host, all at once."""
        values = [*self.sums.values(), *self.counts.values()]
        numbers = iter(torch.stack(values).tolist() if values else [])
        sums = {name: next(numbers) for name in self.sums}
        counts = {name: next(numbers) for name in self.counts}
        return {name: (total, counts.get(name)) for name, total in sums.items()}


def check_teacher(student: Trunk, teacher: Trunk) -> None:
    """Two distributions can be compared only over the same tokens."""
    if student.vocabulary != teacher.vocabulary:
        raise UsageError(
            f"algo.teacher: its vocabulary has {teacher.vocabulary} tokens, the student's {student.vocabulary}. "
            "Choose a teacher and a student of one family, with the same vocabulary."
        )


def new_value_head(model: Any, seed: int) -> torch.nn.Linear:
    """A value for every position, from the trunk's hidden state; small at first."""
    size, like = model.config.get_text_config().hidden_size, next(model.parameters())
    head = torch.nn.Linear(size, 1, bias=False)
    head.weight.data.normal_(0.0, 1 / (size + 1), generator=torch.Generator().manual_seed(seed))
    return head.to(device=like.device, dtype=like.dtype)


def default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
