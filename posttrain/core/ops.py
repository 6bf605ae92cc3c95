"""Maths: log-probabilities and divergences without full logits, returns, the router's balance, the schedule.

Logits are made a chunk of positions at a time and thrown away; the backward pass makes them again. So memory
does not grow with tokens x vocabulary. nn/layers.py has a faster route for plain heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.checkpoint import checkpoint

from posttrain.core.types import Drawing

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [n, H] -> float32 logits [n, V]."""

Doubles = npt.NDArray[np.float64]
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

LOGITS_PER_CHUNK = 2**25  # float32: 128 MiB a chunk
LARGEST_LOG_RATIO = 20.0  # exp(20) is 5e8: nothing that trains comes near it


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
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    vocabulary: int,
    drawing: Drawing = Drawing(),  # noqa: B008  frozen
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target, and the entropy (detached, if not asked otherwise) of its distribution: both [n].

    Both are of the distribution that is drawn from. Which tokens that leaves is decided by these weights, and a target
    always belongs to them: weights that have moved since it was drawn would otherwise give it no probability at all.
    """

    def chunk(states: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = logits = tempered(head(states), drawing.temperature)
        with torch.no_grad():
            least = least_kept(logits, drawing.top_k, drawing.top_p, drawing.min_p)
        if least is not None:
            out = (logits < least).scatter_(-1, wanted[:, None], False)
            drawn = logits.masked_fill(out, -torch.inf)
        normalizer = drawn.logsumexp(-1)
        picked = drawn.gather(-1, wanted[:, None])[:, 0] - normalizer
        with nullcontext() if entropy_gradient else torch.no_grad():  # logits, as 0 times -inf is no number
            entropy = normalizer - ((drawn - normalizer[:, None]).exp() * logits).sum(-1)
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


def kl_estimate(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || reference) from tokens that the policy drew; `log_ratio` is log(policy / reference) of each.

    k1 is unbiased but may be negative, k2 is biased, k3 is unbiased and never negative
    (http://joschu.net/blog/kl-approx.html).
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    assert estimator == "k3", estimator
    bounded = log_ratio.clamp(min=-LARGEST_LOG_RATIO)
    return (-bounded).exp() - 1 + bounded


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """A ratio of probabilities that cannot overflow: infinity times an advantage of 0 would be no number."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def discounted(rewards: Doubles, discount: float) -> Doubles:
    """What is still to come at each token, the token's own included: g[t] = rewards[t] + discount * g[t + 1]."""
    if discount == 1.0:
        return rewards[::-1].cumsum()[::-1]
    backwards: list[float] = []
    ahead = 0.0
    for reward in reversed(rewards.tolist()):
        ahead = reward + discount * ahead
        backwards.append(ahead)
    return np.array(backwards[::-1], dtype=np.float64)


def gae(rewards: Doubles, values: Doubles, gamma: float, gae_lambda: float) -> Doubles:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over an answer; after its last token nothing comes.

    `values[t]` is what the critic expected before token t.
    """
    following = np.append(values[1:], 0.0)[: len(values)]
    return discounted(rewards + gamma * following - values, gamma * gae_lambda)


def router_balance(
    router_logits: Sequence[torch.Tensor],
    experts_per_token: int,
    sample_of: torch.Tensor,
    samples: int,
    add_up: Callable[[torch.Tensor], torch.Tensor] = lambda total: total,
) -> torch.Tensor:
    """Load-balancing loss of a mixture of experts, sample by sample, times the sample's tokens: a scalar sum.

    The usual loss E * sum_e f_e P_e (arXiv:2101.03961, eq. 4-6) averages f and P over whatever is in the batch, so
    its value depends on how the batch is cut. Here f and P are averages over one sample's tokens (and all layers), as
    in DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, eq. 17-20). For one sample it equals transformers' own.
    `add_up`: of sums over tokens that several processes hold.
    """
    probabilities = torch.stack([logits.float().softmax(-1) for logits in router_logits])  # [layers, T, E]
    layers, _, experts = probabilities.shape
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(experts_per_token, dim=-1).indices, 1.0)
    ones = torch.ones_like(sample_of).float()
    lengths = add_up(torch.zeros(samples, device=sample_of.device).index_add_(0, sample_of, ones))

    def mean_over_sample(stream: torch.Tensor) -> torch.Tensor:
        total = add_up(stream.new_zeros(samples, experts).index_add(0, sample_of, stream.sum(0)))
        return total / (layers * lengths[:, None])

    balance = experts * (mean_over_sample(chosen) * mean_over_sample(probabilities)).sum(-1)
    return (balance * lengths).sum()


def tempered(
    logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Logits of the distribution that is really sampled: divided by the temperature, -inf where nothing is drawn.

    In this order, as elsewhere: the temperature; the top_k likeliest; of those the fewest whose probabilities reach
    top_p; of those the ones at least min_p times as likely as the likeliest. The likeliest always stays, and equally
    likely tokens stay or go together, so that the order of a sort decides nothing.
    """
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    least = least_kept(logits, top_k, top_p, min_p)
    return logits if least is None else logits.masked_fill(logits < least, -torch.inf)


def least_kept(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """The smallest logit that truncation leaves: [..., 1], or None where it leaves all."""
    least: torch.Tensor | None = None
    ordered: torch.Tensor | None = None
    if 0 < top_k < logits.shape[-1]:
        ordered = largest(logits, top_k)
        least = ordered[..., -1:]
    if top_p < 1.0:
        if ordered is None:
            normalizer = logits.logsumexp(-1, keepdim=True)
            ordered = likeliest(logits, normalizer, top_p)
        else:
            normalizer = ordered.logsumexp(-1, keepdim=True)
        probabilities = (ordered - normalizer).exp()
        before = probabilities.cumsum(-1) - probabilities
        before[..., 0] = -1.0  # the likeliest stays
        least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    if min_p > 0.0:
        near = logits.amax(-1, keepdim=True) + math.log(min_p)
        least = near if least is None else torch.maximum(least, near)
    return least


def largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The largest logits from the largest down: [..., count]. They lie in the blocks with the largest maxima."""
    block = 512
    whole = logits.shape[-1] // block * block
    if logits.device.type == "cpu" or whole <= 2 * count * block:
        return logits.topk(count, dim=-1).values
    blocks = logits[..., :whole].unflatten(-1, (-1, block))
    chosen = blocks.amax(-1).topk(count, dim=-1).indices[..., None].expand(*logits.shape[:-1], count, block)
    candidates = torch.cat([blocks.gather(-2, chosen).flatten(-2), logits[..., whole:]], -1)
    return candidates.topk(count, dim=-1).values


def likeliest(logits: torch.Tensor, normalizer: torch.Tensor, mass: float) -> torch.Tensor:
    """Logits from the largest down, at least as many as it takes to reach the mass."""
    few = 1024
    if logits.device.type == "cpu" and logits.shape[-1] > 4 * few:  # elsewhere nobody waits for the device to answer
        ordered = logits.topk(few, dim=-1).values
        if bool(((ordered - normalizer).exp().sum(-1) > mass + 1e-4).all()):
            return ordered
    return logits.sort(-1, descending=True).values


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
