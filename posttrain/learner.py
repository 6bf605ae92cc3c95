"""The learner: a model and its optimizer on one device. Knows packs, sums and gradients; knows no algorithm by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.config import ModelConfig, UpdateConfig
from posttrain.data.pack import collate, pack
from posttrain.data.templates import apply_template, stop_ids
from posttrain.errors import UsageError
from posttrain.models import lora
from posttrain.models.checkpoint import load_tensors, save_tensors
from posttrain.models.forward import Trunk, check_router, forward, prove
from posttrain.models.load import load_model, load_tokenizer, load_weights, save_model, trainable_parameters
from posttrain.models.optimizer import Optimizer
from posttrain.types import Batch, Floats, Head, Objective, Outputs, Request, Sample

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
        seed: int = 0,
    ) -> None:
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
        self.optimizer = Optimizer(trainable_parameters(self.model), update) if trainable else None

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

    def logprobs(self, samples: Sequence[Sample], *, adapters: bool = True) -> list[Floats]:
        """Log-probability of each counted token, 0 elsewhere. Without adapters: those of the frozen base model."""
        with nullcontext() if adapters else lora.disabled(self.model):
            return self.streams(samples, "logprobs", lambda out: out.logprobs)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        """The score head's number for each sample."""
        found: dict[int, float] = {}
        for indices, out, _ in self.look(samples, "scores"):
            assert out.scores is not None
            found |= dict(zip(indices, out.scores.tolist(), strict=True))
        return [found[i] for i in range(len(samples))]

    def streams(
        self, samples: Sequence[Sample], name: str, read: Callable[[Outputs], torch.Tensor | None]
    ) -> list[Floats]:
        found: dict[int, Floats] = {}
        for indices, out, batch in self.look(samples, name):
            stream = read(out)
            assert stream is not None
            parts = np.split(stream.cpu().numpy().astype(np.float32), np.cumsum(batch.lengths)[:-1])
            found |= dict(zip(indices, parts, strict=True))
        return [found[i] for i in range(len(samples))]

    @torch.no_grad()
    def look(self, samples: Sequence[Sample], name: str) -> list[tuple[list[int], Outputs, Batch]]:
        """Forward passes only: (indices of the samples, outputs, batch) of each pack."""
        self.model.eval()
        request, seen = Request(names=frozenset({name})), []
        for indices in pack(samples, self.update.tokens_per_device):
            batch = collate([samples[i] for i in indices], self.device)
            seen.append((indices, forward(self.trunk, batch, request), batch))
        self.model.train()
        return seen

    def batches(self, samples: Sequence[Sample], group_size: int) -> list[Batch]:
        packs = pack(samples, self.update.tokens_per_device, group_size)
        return [collate([samples[i] for i in indices], self.device) for indices in packs]

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

    def load(self, folder: Path) -> None:
        assert self.optimizer is not None
        load_weights(self.model, folder / "model")
        self.optimizer.load_state(load_tensors(folder / "optimizer.safetensors"))
        if self.optimizer.average:
            self.optimizer.load_average(load_tensors(folder / "ema.safetensors"))


class Totals:
    """Sums of metrics kept on the device until the step is over, so that no pack waits for the host."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}

    def add(self, name: str, total: torch.Tensor, count: torch.Tensor | None = None) -> None:
        total = total.detach().double()
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


def default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
