"""Log-probabilities and divergences of tokens, computed without holding all logits.

Logits are computed for one chunk of positions at a time and freed; the backward pass computes them again. So memory
does not grow with tokens x vocabulary. nn/lm_head.py has a faster route for plain heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint

from posttrain.core import ops
from posttrain.core.types import SamplingDistribution
from posttrain.parallel.tensor import local_ids
from posttrain.parallel.tensor_group import TensorGroup

LogitsHead = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, H] -> float32 logits [n, V]."""

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

LOGITS_PER_CHUNK = 2**25  # float32: 128 MiB per chunk


def chunk_length(vocabulary: int) -> int:
    """Return the number of positions whose logits are held at once."""
    return max(1, LOGITS_PER_CHUNK // vocabulary)


def in_chunks(
    function: Callable[..., tuple[torch.Tensor, ...]], length: int, *streams: torch.Tensor
) -> list[torch.Tensor]:
    """Apply `function` to chunks of the streams and join the results; the backward pass recomputes activations."""
    pieces = zip(*(stream.split(length) for stream in streams), strict=True)
    if torch.is_grad_enabled():
        results = [checkpoint(function, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    else:
        results = [function(*piece) for piece in pieces]
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


def token_logprobs(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: LogitsHead,
    vocabulary: int,
    distribution: SamplingDistribution = SamplingDistribution(),  # noqa: B008  frozen
    entropy_gradient: bool = False,
    ranks: TensorGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each target, and the entropy of its distribution (detached by default): both [n].

    Both are of the distribution that is sampled from. The current weights decide which tokens truncation leaves, and a
    target is always among them: otherwise weights that changed since it was sampled could give it probability 0.
    `ranks`: those that divide the vocabulary, of which `head` then returns a part; nothing is truncated.
    """

    def chunk(states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = logits = ops.tempered(head(states), distribution.temperature)
        with torch.no_grad():
            least = ops.least_kept(
                logits, distribution.top_k, distribution.top_p, distribution.min_p, distribution.min_p_first
            )
        if least is not None:
            out = (logits < least).scatter_(-1, wanted[:, None], False)
            kept = logits.masked_fill(out, -torch.inf)
        normalizer = kept.logsumexp(-1) if ranks is None else ranks.logsumexp(kept.logsumexp(-1))
        if ranks is None:
            picked = kept.gather(-1, wanted[:, None])[:, 0] - normalizer
        else:
            index, inside = local_ids(wanted, vocabulary, ranks)
            share = kept.gather(-1, index[:, None])[:, 0] * inside - normalizer / ranks.size
            picked = ranks.total(share)
        with nullcontext() if entropy_gradient else torch.no_grad():  # logits: 0 times -inf would be NaN
            mean = ((kept - normalizer[:, None]).exp() * logits).sum(-1)
            entropy = normalizer - mean if ranks is None else ranks.total(normalizer / ranks.size - mean)
        return picked, entropy

    logprobs, entropy = in_chunks(chunk, chunk_length(vocabulary), hidden, targets)
    return logprobs, entropy


def token_divergence(
    hidden: torch.Tensor,
    teacher_hidden: torch.Tensor,
    head: LogitsHead,
    teacher_head: LogitsHead,
    vocabulary: int,
    kind: Divergence,
    jsd_beta: float,
    temperature: float,
    top_k: int = 0,
    ranks: TensorGroup | None = None,
) -> torch.Tensor:
    """Return the divergence between the teacher's and the student's next-token distributions at each position: [n].

    forward_kl is KL(teacher || student), reverse_kl is KL(student || teacher); jsd mixes m = beta teacher +
    (1 - beta) student and returns beta KL(teacher || m) + (1 - beta) KL(student || m). With `top_k` the outcomes are
    the teacher's likeliest tokens, and one more that stands for all others. `ranks`: those that divide the vocabulary,
    of which the heads then return a part; without top_k.
    """

    def log_softmax(logits: torch.Tensor) -> torch.Tensor:
        if ranks is None:
            return logits.log_softmax(-1)
        return logits - ranks.logsumexp(logits.logsumexp(-1))[:, None]

    def chunk(states: torch.Tensor, teacher_states: torch.Tensor) -> tuple[torch.Tensor]:
        student = log_softmax(head(states) / temperature)
        with torch.no_grad():
            teacher = log_softmax(teacher_head(teacher_states) / temperature)
        if 0 < top_k < vocabulary:
            likeliest = teacher.topk(top_k, dim=-1).indices
            teacher, student = (with_rest(logp.gather(-1, likeliest)) for logp in (teacher, student))
        divergence = divergence_of(teacher, student, kind, jsd_beta)
        return (divergence if ranks is None else ranks.total(divergence),)

    (divergence,) = in_chunks(chunk, chunk_length(vocabulary), hidden, teacher_hidden)
    return divergence


def listed_divergence(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    logprobs: torch.Tensor,
    head: LogitsHead,
    vocabulary: int,
    kind: Divergence,
    jsd_beta: float,
    temperature: float,
) -> torch.Tensor:
    """Return the divergence as `token_divergence` with top_k does, from the teacher's likeliest tokens: ids [n, k]."""

    def chunk(states: torch.Tensor, tokens: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor]:
        student = (head(states) / temperature).log_softmax(-1).gather(-1, tokens)
        if tokens.shape[-1] < vocabulary:
            teacher, student = with_rest(teacher), with_rest(student)
        return (divergence_of(teacher, student, kind, jsd_beta),)

    (divergence,) = in_chunks(chunk, chunk_length(vocabulary), hidden, ids, logprobs)
    return divergence


def likeliest_tokens(
    hidden: torch.Tensor, head: LogitsHead, vocabulary: int, count: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the likeliest tokens at each position, and their log-probabilities: both [n, count]."""

    def chunk(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = (head(states) / temperature).log_softmax(-1).topk(min(count, vocabulary), dim=-1)
        return best.indices, best.values

    ids, logprobs = in_chunks(chunk, chunk_length(vocabulary), hidden)
    return ids, logprobs


def divergence_of(teacher: torch.Tensor, student: torch.Tensor, kind: Divergence, jsd_beta: float) -> torch.Tensor:
    """Return the divergence of two distributions over the last axis, given their log-probabilities."""
    if kind == "forward_kl":
        return kl(teacher, student)
    if kind == "reverse_kl":
        return kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(jsd_beta), student + math.log1p(-jsd_beta))
    return jsd_beta * kl(teacher, mixture) + (1 - jsd_beta) * kl(student, mixture)


def with_rest(logp: torch.Tensor) -> torch.Tensor:
    """Append the log-probability of all outcomes that are not listed: [n, k] -> [n, k + 1]."""
    listed = logp.logsumexp(-1, keepdim=True).clamp(max=-1e-6)  # rounding may take the sum to 1 and above
    return torch.cat([logp, torch.log(-torch.expm1(listed))], -1)


def kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) over the last axis."""
    return (logp.exp() * (logp - logq)).sum(-1)
