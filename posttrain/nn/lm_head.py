"""The language-model head: log-probabilities of tokens, and for separable losses their gradients in the same pass.

Logits are [tokens, vocabulary], too large to keep, so they are computed for one chunk of tokens at a time and freed.
The usual way computes every chunk twice, because the loss is only known once all log-probabilities are:

    forward    per chunk:  hidden -> logits -> log-probabilities, entropy        saved: hidden, targets, normalizer
    loss       all log-probabilities -> loss -> d log-probabilities
    backward   per chunk:  hidden -> logits (again) -> d logits -> d hidden, d weight

A loss is *separable* (Algorithm.separable) if a token's part of it reads no other token's log-probability, entropy or
divergence: a sum over tokens, as in SFT, or PPO's clipped ratio per token. Then d loss / d log-probability of a token
is known as soon as its own log-probability is, and the backward pass of a chunk follows its forward pass while its
logits exist:

    forward    per chunk:  hidden -> logits -> log-probabilities, entropy
                                       |                |
                                       |         EarlyGradients: the loss of what is known so far, 0 for later tokens
                                       |                |
                                       |         d log-probabilities, d entropy of this chunk
                                       |                |
                                    d logits  <---------+        (written over the logits)
                                       |
                                       +-> d hidden, d weight     saved: these two only
    loss       as above; its d log-probabilities are compared with those that were used
    backward   returns d hidden and d weight

It is exact: the same operations run on the same numbers, only earlier. The price is one more evaluation of the loss per
chunk, which is small against a product with the head. Conditions, which the callers keep:

- the loss is separable. A false claim is detected: `EarlyGradients.compare` reports the difference at every step, and
  the learner stops the run if it is more than rounding;
- the number that is differentiated is exactly loss / denominator: the backward pass returns what the forward pass
  formed and does not read the gradients that autograd hands to it;
- only log-probabilities, entropy and divergence are requested, and this rank computes all of them (no context
  parallelism). Log-probabilities and divergence are computed one after the other, from logits of their own, and the
  loss is a sum of a part that reads the former and a part that reads the latter.

The divergence from a teacher goes the same way, with the logits of both models: four products with a head per chunk
instead of six.

With sequence parallelism (parallel/tensor.py) tensor ranks divide the vocabulary. Each runs the same kernels on the
logits of its part, and the ranks exchange three numbers per token: log-normalizer, entropy and the target's logit
(`combine_parts`). Given normalizer and entropy over the whole vocabulary, the backward pass needs no exchange but the
sum of d hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from posttrain.core.types import MicroBatch, Objective, Outputs, SamplingDistribution
from posttrain.nn import attention
from posttrain.nn.kernels.reference import kernels_for
from posttrain.nn.logprobs import Divergence
from posttrain.nn.weights import MASTER, add_product, is_plain_linear, weight_gradients
from posttrain.parallel.tensor import local_ids
from posttrain.parallel.tensor_group import TensorGroup

LOGITS_PER_CHUNK = 2**29  # half precision: 1 GiB
LOGITS_PER_CPU_CHUNK = 2**22  # float32: 16 MiB, which stays in a CPU's cache


@dataclass(slots=True, frozen=True, eq=False)
class FusedHead:
    """A head that is a single matrix, with kernels for its log-probabilities."""

    head: torch.nn.Linear
    kernels: ModuleType
    ranks: TensorGroup | None = None  # which divide the vocabulary
    multiple: int = 256  # positions are padded to a multiple, so that matrix products have few different sizes

    @classmethod
    def from_model(cls, model: Any, kernels: ModuleType | None = None) -> FusedHead | None:
        """Wrap the head; None if it is anything but one matrix, or if there are no kernels for the device."""
        head, config = model.get_output_embeddings(), model.config
        scalings = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        ranks = getattr(head, "tensor_group", None)
        plain = head is not None and (is_plain_linear(head) or ranks is not None) and head.bias is None
        if not plain or any(getattr(config, name, None) is not None for name in scalings):
            return None
        on_cpu = head.weight.device.type == "cpu"
        if kernels is None and not on_cpu and not attention.supports_varlen_kernel(model):
            return None
        return cls(head, kernels or kernels_for(head.weight.device), ranks, 1 if on_cpu else 256)

    def supports(self, distribution: SamplingDistribution) -> bool:
        """Whether the kernels compute log-probabilities of this distribution: only the temperature may differ."""
        return not distribution.top_k and distribution.top_p >= 1.0 and not distribution.min_p

    def logprobs(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        *,
        entropy: bool,
        entropy_gradient: bool,
        early: EarlyGradients | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probability of each target and entropy, as nn/logprobs.py does; 0 if no entropy is wanted."""
        count = len(targets)
        padding = -count % self.multiple
        if padding:
            hidden, targets = F.pad(hidden, (0, 0, 0, padding)), F.pad(targets, (0, padding))
        weight: Any = self.head.weight
        options = (temperature or 1.0, self.kernels, entropy, early, self.ranks, len(weight))
        local = weight if self.ranks is None else weight.to_local()
        logprobs, entropies = HeadLogprobs.apply(hidden, local, targets, *options)
        return logprobs[:count], entropies[:count] if entropy_gradient else entropies[:count].detach()

    def divergence(
        self,
        hidden: torch.Tensor,
        teacher: FusedHead,
        teacher_hidden: torch.Tensor,
        kind: Divergence,
        jsd_beta: float,
        temperature: float,
        early: EarlyGradients | None = None,
    ) -> torch.Tensor:
        """Return the divergence from the teacher at each position [n], as nn/logprobs.py defines it."""
        count = len(hidden)
        padding = -count % self.multiple
        states = [F.pad(each, (0, 0, 0, padding)) if padding else each for each in (hidden, teacher_hidden)]
        options = (teacher.head.weight.detach(), states[1], (temperature, kind, jsd_beta), self.kernels, early)
        return HeadDivergence.apply(states[0], self.head.weight, *options)[:count]


class EarlyGradients:
    """Computes the gradients of a separable loss for one chunk of tokens before later chunks are known.

    The loss is evaluated with the outputs that are known so far, and 0 for all others.
    """

    def __init__(
        self,
        objective: Objective,
        batch: MicroBatch,
        denominator: float,
        report_error: Callable[[torch.Tensor], None],
    ) -> None:
        """`report_error` is called with the relative error of the gradients used, once the whole loss is known."""
        self.objective, self.batch, self.denominator, self.report_error = objective, batch, denominator, report_error
        names = set(objective.request.names)
        if names & {"logprobs", "entropy"}:  # computed together
            names |= {"logprobs", "entropy"}
        self.known: dict[str, torch.Tensor] = {name: self.zeros() for name in names}
        self.used: dict[str, torch.Tensor] = {}  # gradients

    def zeros(self) -> torch.Tensor:
        return torch.zeros(len(self.batch.counted), device=self.batch.tokens.device)

    def chunk_gradients(
        self, first: int, chunk: dict[str, torch.Tensor], wanted: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return the gradients of the loss by the outputs of the chunk that begins at `first`: by those wanted."""
        rows = slice(first, first + len(chunk[wanted[0]]))
        count = len(self.known[wanted[0]][rows])  # the rest is padding
        for name, values in chunk.items():
            self.known[name][rows] = values[:count]
        with torch.enable_grad():
            inputs = {name: self.known[name].clone().requires_grad_() for name in wanted}
            streams = {name: to_stream(values, self.batch) for name, values in (self.known | inputs).items()}
            total = self.objective.loss(Outputs(**streams), self.batch).total / self.denominator
            gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True, materialize_grads=True)
        found = {}
        for name, gradient in zip(wanted, gradients, strict=True):
            self.used.setdefault(name, self.zeros())[rows] = gradient[rows]
            found[name] = F.pad(gradient[rows], (0, len(chunk[name]) - count))
        return found

    def compare(self, name: str, gradient: torch.Tensor) -> None:
        """Report how much the gradients used for an output differ from those of the whole loss."""
        used = self.used[name]
        difference = (gradient[: len(used)] - used).abs().sum()
        self.report_error(difference / gradient.abs().sum().clamp(min=1e-30))


def to_stream(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Scatter values [M] at the counted positions into a stream [T], 0 elsewhere."""
    return values.new_zeros(len(batch.tokens)).index_copy(0, batch.counted, values)


class HeadLogprobs(torch.autograd.Function):
    """Computes log-probability of each target and entropy, with the logits of one chunk at a time.

    With `early` the backward pass of a chunk follows its forward pass at once; see the head of this module.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        kernels: ModuleType,
        with_entropy: bool,
        early: EarlyGradients | None,
        ranks: TensorGroup | None,
        vocabulary: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size, inside, own_targets = chunk_size(weight), None, targets
        if ranks is not None:
            size = chunk_size(weight, columns=-(-vocabulary // ranks.size))  # the same on all ranks
            targets, inside = local_ids(targets, vocabulary, ranks)
            own_targets = torch.where(inside, targets, -1)
        back = HeadGradients(hidden, weight, ctx.needs_input_grad[1]) if early is not None else None
        parts = []
        for rows in chunk_rows(len(hidden), size):
            logits = hidden[rows] @ weight.t()
            picked, entropy, normalizer = kernels.target_logprobs(
                logits, targets[rows], temperature, with_entropy=with_entropy
            )
            if ranks is not None and inside is not None:
                picked, entropy, normalizer = combine_parts(picked, entropy, normalizer, inside[rows], ranks)
            parts.append((picked, entropy, normalizer))
            if back is not None and early is not None:
                wanted = ("logprobs", "entropy") if early.objective.request.entropy_gradient else ("logprobs",)
                found = early.chunk_gradients(rows.start, {"logprobs": picked, "entropy": entropy}, wanted)
                known = (normalizer, entropy, found["logprobs"], found.get("entropy"))
                back.add(rows, kernels.target_logprobs_backward(logits, own_targets[rows], temperature, *known))
            del logits  # free them before the next chunk's are allocated
        logprobs, entropy, normalizer = (torch.cat(streams) for streams in zip(*parts, strict=True))
        ctx.save_for_backward(*(() if back is not None else (hidden, own_targets, normalizer, entropy)))
        ctx.weight, ctx.options, ctx.early, ctx.back = weight, (temperature, kernels, size), early, back
        ctx.ranks = ranks
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        d_picked, d_entropy = gradients
        back: HeadGradients | None = ctx.back
        if back is None:
            hidden, targets, normalizer, entropy = ctx.saved_tensors
            weight, (temperature, kernels, size) = ctx.weight, ctx.options
            if d_picked is None:
                d_picked = torch.zeros_like(normalizer)
            back = HeadGradients(hidden, weight, ctx.needs_input_grad[1])
            for rows in chunk_rows(len(hidden), size):
                known = (normalizer[rows], entropy[rows], d_picked[rows].contiguous())
                more = None if d_entropy is None else d_entropy[rows].contiguous()
                logits = hidden[rows] @ weight.t()
                back.add(rows, kernels.target_logprobs_backward(logits, targets[rows], temperature, *known, more))
                del logits
        elif d_picked is not None:
            ctx.early.compare("logprobs", d_picked)
        d_hidden = back.d_hidden if ctx.ranks is None else ctx.ranks.sum_(back.d_hidden)
        return d_hidden, back.d_weight, *[None] * 7


def combine_parts(
    picked: torch.Tensor, entropy: torch.Tensor, normalizer: torch.Tensor, inside: torch.Tensor, ranks: TensorGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return target log-probability, entropy and log-normalizer over the vocabulary from those over the ranks' parts.

    A part with normalizer n_r and entropy e_r has the share exp(n_r - n) of the probability and the mean logit
    n_r - e_r.
    """
    target = torch.where(inside, picked + normalizer, 0.0)  # its logit
    logits, entropies, normalizers = ranks.stacked(torch.stack([target, entropy, normalizer])).unbind(1)
    whole = normalizers.logsumexp(0)
    mean = ((normalizers - whole).exp() * (normalizers - entropies)).sum(0)
    return logits.sum(0) - whole, whole - mean, whole


class HeadDivergence(torch.autograd.Function):
    """Computes the divergence of each position with the logits of one chunk at a time.

    With `early` the backward pass of a chunk follows its forward pass at once, otherwise it computes the logits again.
    Reading and writing logits takes long, so one kernel reads both models' logits once (for jsd twice), and one writes
    the gradient over the student's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        options: tuple[float, Divergence, float],
        kernels: ModuleType,
        early: EarlyGradients | None,
    ) -> torch.Tensor:
        size = chunk_size(weight, heads=2)
        back = HeadGradients(hidden, weight, ctx.needs_input_grad[1]) if early is not None else None
        parts = []
        for rows in chunk_rows(len(hidden), size):
            logits, teacher_logits = hidden[rows] @ weight.t(), teacher_hidden[rows] @ teacher_weight.t()
            parts.append(kernels.divergence(logits, teacher_logits, *options))
            if back is not None and early is not None:
                value, *known = parts[-1]
                found = early.chunk_gradients(rows.start, {"divergence": value}, ("divergence",))
                streams = (*known, found["divergence"])
                back.add(rows, kernels.divergence_backward(logits, teacher_logits, *options, *streams))
            del logits, teacher_logits  # free them before the next chunk's are allocated
        divergence, *known = (torch.cat(streams) for streams in zip(*parts, strict=True))
        ctx.save_for_backward(*(() if back is not None else (hidden, teacher_hidden, *known)))
        ctx.weight, ctx.teacher_weight = weight, teacher_weight
        ctx.options, ctx.kernels, ctx.size, ctx.early, ctx.back = options, kernels, size, early, back
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back: HeadGradients | None = ctx.back
        if back is None:
            hidden, teacher_hidden, *known = ctx.saved_tensors
            back = HeadGradients(hidden, ctx.weight, ctx.needs_input_grad[1])
            for rows in chunk_rows(len(hidden), ctx.size):
                logits, teacher_logits = hidden[rows] @ ctx.weight.t(), teacher_hidden[rows] @ ctx.teacher_weight.t()
                streams = [stream[rows] for stream in (*known, gradients[0].contiguous())]
                back.add(rows, ctx.kernels.divergence_backward(logits, teacher_logits, *ctx.options, *streams))
                del logits, teacher_logits
        else:
            ctx.early.compare("divergence", gradients[0])
        return back.d_hidden, back.d_weight, *[None] * 5


def chunk_size(weight: torch.Tensor, heads: int = 1, columns: int = 0) -> int:
    """Return the number of positions whose logits are held at once: `columns` of each of `heads` models; 0: all."""
    most = LOGITS_PER_CPU_CHUNK if weight.device.type == "cpu" else LOGITS_PER_CHUNK
    size = max(1, most // (heads * (columns or len(weight))))
    return size - (size % 128 if size > 128 else 0)  # whole tiles of a matrix product


def chunk_rows(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, max(1, count), size))


class HeadGradients:
    """Accumulates the gradients of the hidden states and of the head's weight from those of one chunk of logits."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, trains_weight: bool) -> None:
        self.hidden, self.weight, self.trains_weight = hidden, weight, trains_weight
        self.d_hidden = torch.empty_like(hidden)
        self.d_weight: torch.Tensor | None = None  # None if it is added to the gradient of the weight's master

    def add(self, rows: slice, d_logits: torch.Tensor) -> None:
        torch.mm(d_logits, self.weight, out=self.d_hidden[rows])
        if not self.trains_weight:
            return
        if hasattr(self.weight, MASTER):
            weight_gradients([self.weight], d_logits, self.hidden[rows])
        else:
            self.d_weight = add_product(self.d_weight, d_logits.t(), self.hidden[rows])


__all__ = ["EarlyGradients", "FusedHead", "to_stream"]
