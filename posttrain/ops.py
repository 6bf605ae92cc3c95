"""Maths on tensors: log-probabilities and divergences without full logits, the router's balance, the schedule.

Logits are made a chunk of positions at a time and thrown away; the backward pass makes them again. So memory
does not grow with tokens x vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, H] -> float32 logits [n, V]."""

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

LOGITS_PER_CHUNK = 2**25  # float32: 128 MiB a chunk


def chunk_length(vocabulary: int) -> int:
    """Positions whose logits are held at once."""
    return max(1, LOGITS_PER_CHUNK // vocabulary)


def in_chunks(
    function: Callable[..., tuple[torch.Tensor, ...]], length: int, *streams: torch.Tensor
) -> list[torch.Tensor]:
    """Apply `function` to pieces of the streams and join the results; nothing inside is kept for the backward pass."""
    pieces = zip(*(stream.split(length) for stream in streams), strict=True)
    if torch.is_grad_enabled():
        results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    else:
        results = [function(*piece) for piece in pieces]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def token_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the entropy (detached) of the distribution it came from: both [n]."""

    def chunk(states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(states)
        normalizer = logits.logsumexp(-1)
        picked = logits.gather(-1, wanted[:, None])[:, 0] - normalizer
        with torch.no_grad():
            entropy = normalizer - ((logits - normalizer[:, None]).exp() * logits).sum(-1)
        return picked, entropy

    logprobs, entropy = in_chunks(chunk, chunk_length(vocabulary), hidden, targets)
    return logprobs, entropy


def token_divergence(
    hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    head: Head,
    teacher_head: Head,
    vocabulary: int,
    kind: Divergence,
    jsd_beta: float,
    temperature: float,
) -> torch.Tensor:
    """Divergence between the teacher's and the student's next-token distributions at each position: [n].

    forward_kl is KL(teacher || student), reverse_kl is KL(student || teacher); jsd mixes m = beta teacher +
    (1 - beta) student and returns beta KL(teacher || m) + (1 - beta) KL(student || m).
    """

    def chunk(states: torch.Tensor, teacher_states: torch.Tensor) -> tuple[torch.Tensor]:
        student = (head(states) / temperature).log_softmax(-1)
        with torch.no_grad():
            teacher = (teacher_head(teacher_states) / temperature).log_softmax(-1)
        if kind == "forward_kl":
            return (kl(teacher, student),)
        if kind == "reverse_kl":
            return (kl(student, teacher),)
        mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
        return (jsd_beta * kl(teacher, mixture) + (1 - jsd_beta) * kl(student, mixture),)

    (divergence,) = in_chunks(chunk, chunk_length(vocabulary), hidden, teacher_hidden)
    return divergence


def kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """KL(p || q) over the last axis."""
    return (logp.exp() * (logp - logq)).sum(-1)


def router_balance(
    router_logits: Sequence[torch.Tensor], experts_per_token: int, sample_of: torch.Tensor, samples: int
) -> torch.Tensor:
    """Load-balancing loss of a mixture of experts, sample by sample, times the sample's tokens: a scalar sum.

    The usual loss E * sum_e f_e P_e (arXiv:2101.03961, eq. 4-6) averages f and P over whatever is in the batch, so
    its value depends on how the batch is cut. Here f and P are averages over one sample's tokens (and all layers), as
    in DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, eq. 17-20). For one sample it equals transformers' own.
    """
    probabilities = torch.stack([logits.float().softmax(-1) for logits in router_logits])  # [layers, T, E]
    layers, _, experts = probabilities.shape
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(experts_per_token, dim=-1).indices, 1.0)
    lengths = torch.zeros(samples, device=sample_of.device).index_add_(0, sample_of, torch.ones_like(sample_of).float())

    def mean_over_sample(stream: torch.Tensor) -> torch.Tensor:
        total = stream.new_zeros(samples, experts).index_add(0, sample_of, stream.sum(0))
        return total / (layers * lengths[:, None])

    balance = experts * (mean_over_sample(chosen) * mean_over_sample(probabilities)).sum(-1)
    return (balance * lengths).sum()


def tempered(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Logits of the distribution that is really sampled: divided by the temperature, -inf where nothing is drawn.

    In this order, as elsewhere: the temperature; the top_k likeliest; of those the fewest whose probabilities reach
    top_p; of those the ones at least min_p times as likely as the likeliest. The likeliest always stays.
    """
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        out = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, order, mass_before >= top_p)
        logits = logits.masked_fill(out, -torch.inf)
    if min_p > 0.0:
        top = logits.max(-1, keepdim=True).values
        logits = logits.masked_fill(logits < top + math.log(min_p), -torch.inf)
    return logits


def learning_rate_at(
    step: int,
    total_steps: int,
    peak: float,
    schedule: Literal["cosine", "linear", "constant"],
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """Rate of optimizer step `step` (from 1): linear warm-up to the peak, then down to peak * min_ratio at the last."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    remaining = 1 - min(1.0, done)
    if schedule == "cosine":
        remaining = 0.5 * (1 - math.cos(math.pi * remaining))
    return peak * (min_ratio + (1 - min_ratio) * remaining)
