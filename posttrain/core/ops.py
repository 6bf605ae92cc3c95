"""Formulas that several packages use: KL estimates, returns, the router's balance, truncated sampling, the schedule.

Importing this module does not load PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from posttrain.core.lazy import torch

Doubles = npt.NDArray[np.float64]

LARGEST_LOG_RATIO = 20.0  # exp(20) is 5e8: nothing that trains comes near it


def kl_estimate(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) from sampled tokens; `log_ratio` is log(policy / reference) of each.

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
    """Return a ratio of probabilities that cannot overflow: infinity times an advantage of 0 would be NaN."""
    return log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()


def discounted(rewards: Doubles, discount: float) -> Doubles:
    """Return the discounted reward to go of each token: g[t] = rewards[t] + discount * g[t + 1]."""
    if discount == 1.0:
        return rewards[::-1].cumsum()[::-1]
    backwards: list[float] = []
    ahead = 0.0
    for reward in reversed(rewards.tolist()):
        ahead = reward + discount * ahead
        backwards.append(ahead)
    return np.array(backwards[::-1], dtype=np.float64)


def gae(rewards: Doubles, values: Doubles, gamma: float, gae_lambda: float) -> Doubles:
    """Compute generalised advantage estimates (arXiv:1506.02438, eq. 16) of one completion; no state follows.

    `values[t]` is the critic's value of the state before token t.
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
    """Compute the load-balancing loss of a mixture of experts per sample, times the sample's tokens: a scalar sum.

    The usual loss E * sum_e f_e P_e (arXiv:2101.03961, eq. 4-6) averages f and P over whatever is in the batch, so
    its value depends on how the batch is cut. Here f and P are averages over one sample's tokens (and all layers), as
    in DeepSeek-V3's sequence-wise loss (arXiv:2412.19437, eq. 17-20). For one sample it equals transformers' own.
    `add_up`: adds sums over the tokens of several processes.
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
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    min_p_first: bool = False,
) -> torch.Tensor:
    """Return the logits of the distribution that is sampled from: divided by the temperature, -inf where truncated.

    In this order, as elsewhere: the temperature; the top_k likeliest; of those the fewest whose probabilities reach
    top_p; of those the ones at least min_p times as likely as the likeliest (with `min_p_first` before top_k). The
    likeliest always stays, and equally likely tokens stay or go together, so that the order of a sort decides nothing.
    """
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    least = least_kept(logits, top_k, top_p, min_p, min_p_first)
    return logits if least is None else logits.masked_fill(logits < least, -torch.inf)


def least_kept(
    logits: torch.Tensor, top_k: int, top_p: float, min_p: float, min_p_first: bool = False
) -> torch.Tensor | None:
    """Return the smallest logit that truncation keeps: [..., 1], or None where it keeps all.

    `min_p_first`: top_p is then a share of what min_p leaves.
    """
    if min_p_first and min_p > 0.0:
        near = logits.amax(-1, keepdim=True) + math.log(min_p)
        further = least_kept(logits.masked_fill(logits < near, -torch.inf), top_k, top_p, 0.0)
        return near if further is None else torch.maximum(near, further)
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
    """Return the largest logits in descending order: [..., count]. They lie in the blocks with the largest maxima."""
    block = 512
    whole = logits.shape[-1] // block * block
    if logits.device.type == "cpu" or whole <= 2 * count * block:
        return logits.topk(count, dim=-1).values
    blocks = logits[..., :whole].unflatten(-1, (-1, block))
    chosen = blocks.amax(-1).topk(count, dim=-1).indices[..., None].expand(*logits.shape[:-1], count, block)
    candidates = torch.cat([blocks.gather(-2, chosen).flatten(-2), logits[..., whole:]], -1)
    return candidates.topk(count, dim=-1).values


def likeliest(logits: torch.Tensor, normalizer: torch.Tensor, mass: float) -> torch.Tensor:
    """Return logits in descending order, at least as many as it takes to reach the probability mass."""
    few = 1024
    if logits.device.type == "cpu" and logits.shape[-1] > 4 * few:  # elsewhere this would wait for the device
        ordered = logits.topk(few, dim=-1).values
        if bool(((ordered - normalizer).exp().sum(-1) > mass + 1e-4).all()):
            return ordered
    return logits.sort(-1, descending=True).values


def learning_rate_at(
    step: int,
    decay_steps: int,
    peak: float,
    schedule: Literal["cosine", "linear", "constant"],
    warmup_steps: int,
    min_ratio: float,
) -> float:
    """Return the rate of step `step` (from 1): linear warm-up to the peak, then decay to min_ratio * peak.

    It reaches that at step `decay_steps` and keeps it afterwards.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    done = (step - warmup_steps) / max(1, decay_steps - warmup_steps)
    remaining = 1 - min(1.0, done)
    if schedule == "cosine":
        remaining = 0.5 * (1 - math.cos(math.pi * remaining))
    return peak * (min_ratio + (1 - min_ratio) * remaining)
