"""The values that pass between modules: a ragged `Sample` on the controller, a packed `MicroBatch` on the worker.

The alignment rule: `x[i]` belongs to `tokens[i]`, and `logprobs[i]` is the log-probability of `tokens[i]` given all
tokens before it. Only nn/forward.py shifts logits against tokens.

    tokens    <s>  2   +   2   =   4   </s>
    mask       0   0   0   0   0   1   1      True where the policy chose the token and it counts
    logprobs   0   0   0   0   0  -.1 -.3     log p(4 | <s> 2 + 2 =), log p(</s> | ... 4)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from posttrain.core.lazy import torch

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Experts = npt.NDArray[np.int16]
"""The experts of each token, layer by layer: [tokens, mixture layers, experts per token]; -1: not recorded."""
Unit = Literal["token", "sample", "group"]
ExampleKind = Literal["text", "chat", "pair", "labelled", "stepwise", "prompt"]  # what an algorithm trains on
Head = Literal["token", "score"]
ExpertUse = Literal["ignore", "compare", "replay"]
"""What a pass does with the experts that samples record: count where its routers choose others, or use them."""
WeightVersion = int
"""Which training step weights come from: the number of steps after which they were the policy's; 0: the initial ones.

The online loop counts its steps; that is the only counter. Generators are given the version together with the weights
and record it in the samples that they generate with them.
"""

TurnCredit = tuple[int, int, float, str]
"""A reply of a conversation: its first token, the token after its last, its reward, and the state that it replied to.

Replies to equal states can be compared (`algo.credit step_group`); an empty state is that of the tokens before.
"""

STREAMS = ("logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns", "targets", "penalties")
LISTED = ("teacher_ids", "teacher_logprobs")  # several numbers per token
SCALARS = ("reward", "label", "margin", "baseline", "staleness")


@dataclass(slots=True, frozen=True, kw_only=True, eq=False)
class Prompt:
    """A tokenised prompt, with the columns of its example that reward functions may read."""

    tokens: Ints  # up to where the completion begins
    messages: list[dict[str, Any]]
    columns: dict[str, Any] = field(default_factory=dict)  # all of the example's; ground_truth where the data has one
    origin: str = ""  # file:line of its example


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One sequence of tokens with its per-token streams and its scalars."""

    tokens: Ints
    mask: Bools
    # Streams: one number per token.
    logprobs: Floats | None = None  # the sampler's, of the distribution it sampled from
    old_logprobs: Floats | None = None  # the trainer's own, before the first of several updates
    ref_logprobs: Floats | None = None
    values: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    targets: Floats | None = None  # process rewards: probability that the step ending here is correct
    penalties: Floats | None = None  # weight of abs(log(policy / old policy)) at each token
    experts: Experts | None = None  # those that the sampler's routers chose
    teacher_ids: Ints | None = None  # [tokens, k]: a teacher's likeliest tokens at each place, 0 where none counts
    teacher_logprobs: Floats | None = None  # [tokens, k]: the teacher's log-probabilities of them
    # Scalars: one number per sample.
    reward: float = 0.0
    reward_terms: tuple[tuple[float, float], ...] = ()  # weight and value of each reward that the sum has
    turns: tuple[TurnCredit, ...] = ()  # of a conversation, in order; empty: its completion is one turn
    label: float = 0.0  # KTO: 1 desirable, 0 undesirable, -1 mismatched pair that only measures the KL
    margin: float = 0.0  # by how much the chosen completion is better, if the data has it
    baseline: float = 0.0  # written by the algorithm's assign_credit() over the whole batch
    staleness: float = 0.0  # updates between the weights that generated its first token and those that train on it
    # Where it comes from.
    group: int = 0  # samples of one prompt (or the two of a pair) share it
    version: WeightVersion = 0  # of the weights that generated its first token
    newest: WeightVersion = 0  # of those that generated its last token: larger, if they changed in between
    version_spans: tuple[tuple[WeightVersion, int], ...] = ()  # of weights and their tokens, in order, if several
    finish: str = ""  # stop, length, error
    origin: str = ""  # file:line of its example
    reused: float = 0.0  # share of the prompt's tokens (of all turns) whose keys and values were in the KV cache
    preemptions: int = 0  # how often it was interrupted and computed again, because the KV cache was full
    draft_tokens: int = 0  # that speculative decoding proposed
    accepted_tokens: int = 0  # of them, those that were sampled

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0:
            raise ValueError(f"{self.origin or 'sample'}: no tokens")
        if self.mask.dtype != np.bool_ or self.mask.shape != (n,):
            raise ValueError(
                f"{self.origin or 'sample'}: mask is {self.mask.dtype}{self.mask.shape}, expected bool({n},)"
            )
        if self.mask[0]:
            raise ValueError(f"{self.origin or 'sample'}: the first token cannot count, nothing comes before it")
        for name in STREAMS:
            stream = getattr(self, name)
            if stream is not None and stream.shape != (n,):
                raise ValueError(f"{self.origin or 'sample'}: {name} has shape {stream.shape}, expected ({n},)")
        if self.experts is not None and (self.experts.ndim != 3 or len(self.experts) != n):
            raise ValueError(
                f"{self.origin or 'sample'}: experts has shape {self.experts.shape}, expected ({n}, .., ..)"
            )

        for name in LISTED:
            listed = getattr(self, name)
            if listed is not None and (listed.ndim != 2 or len(listed) != n):
                raise ValueError(f"{self.origin or 'sample'}: {name} has shape {listed.shape}, expected ({n}, ..)")

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True, kw_only=True, eq=False)
class PrefixSharing:
    """What the layers compute of a micro-batch whose neighbours share a prefix: the prefix once, then the rest of each.

    samples     p p p a a | p p p b | c c      T = 11 tokens
    computed    p p p | a a | b | c c          U = 8 tokens in pieces; a a and b also attend to p p p
    """

    tokens: torch.Tensor  # [U]
    positions: torch.Tensor  # [U], those that the tokens have in their samples
    place: torch.Tensor  # [T], index in `tokens` of each token of the micro-batch
    starts: torch.Tensor  # [pieces + 1] int32, cumulative lengths
    lengths: tuple[int, ...]  # of the pieces
    keys: torch.Tensor  # [K], indices of the tokens that a piece attends to, piece by piece; its own come last
    key_starts: torch.Tensor  # [pieces + 1] int32
    key_lengths: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class MicroBatch:
    """B samples packed end to end into one sequence of T tokens; no padding, no attention between samples."""

    tokens: torch.Tensor  # [T]
    positions: torch.Tensor  # [T], from 0 in every sample
    sample_of: torch.Tensor  # [T], index of the sample a token belongs to
    starts: torch.Tensor  # [B + 1] int32, cumulative lengths
    lengths: tuple[int, ...]  # the same on the host, which avoids waiting for the device
    mask: torch.Tensor  # [T] bool
    counted: torch.Tensor  # [M] indices where mask is True, computed on the host
    logprobs: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    penalties: torch.Tensor | None = None
    reward: torch.Tensor  # [B], as are the next four
    label: torch.Tensor
    margin: torch.Tensor
    baseline: torch.Tensor
    staleness: torch.Tensor
    sharing: PrefixSharing | None = None  # None: no prefix is shared
    experts: torch.Tensor | None = None  # int16, as in Sample, of the tokens that the layers compute; None: no record
    teacher_ids: torch.Tensor | None = None  # [T, k], as in Sample
    teacher_logprobs: torch.Tensor | None = None  # [T, k]

    def computed(self, index: torch.Tensor) -> torch.Tensor:
        """Map indices of tokens to indices in the layers' output."""
        return index if self.sharing is None else self.sharing.place[index]

    def per_sample(self, stream: torch.Tensor) -> torch.Tensor:
        """Sum `stream` over each sample's counted tokens: [T] -> [B]."""
        out = stream.new_zeros(len(self.lengths))
        return out.index_add(0, self.sample_of[self.counted], stream[self.counted])

    def counts(self) -> torch.Tensor:
        """Return the number of counted tokens of each sample: [B]; at least 1, so that it can be divided by."""
        return self.per_sample(self.mask.float()).clamp(min=1)

    def pairs(self, per_sample: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a [B] tensor whose groups are (chosen, rejected) into the two."""
        return per_sample[0::2], per_sample[1::2]


@dataclass(slots=True, kw_only=True, eq=False)
class Outputs:
    """What the model computes of a micro-batch; fields that the request does not name are None.

    Token streams have length T and are 0 where the mask is False.
    """

    logprobs: torch.Tensor | None = None  # [T]
    entropy: torch.Tensor | None = None  # [T], detached unless the request asks for its gradient
    divergence: torch.Tensor | None = None  # [T], from the teacher's distribution
    scores: torch.Tensor | None = None  # [B], at each sample's last token
    values: torch.Tensor | None = None  # [T], value of the state before tokens[i]
    likeliest: tuple[torch.Tensor, torch.Tensor] | None = None  # [M, k], tokens and their log-probabilities
    choices: torch.Tensor | None = None  # [M, R], log-probabilities of R reward tokens after counted position m
    router_loss: torch.Tensor | None = None  # sum over tokens of the load-balancing loss
    rerouted: torch.Tensor | None = None  # [T], 1 where the token before has other experts than it had in the sampler


Metrics: TypeAlias = "dict[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]"
"""Metrics of a micro-batch by name; see `Loss`."""


@dataclass(slots=True)
class Loss:
    """A sum over the algorithm's unit; the learner alone divides, by the global count.

    A metric is a sum over the same unit, or a pair (sum, count) if it is a mean over something else. A metric whose
    name begins with `largest_` is the largest of all micro-batches, not a sum.
    """

    total: torch.Tensor
    metrics: Metrics = field(default_factory=dict)


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingDistribution:
    """How the distribution that tokens are sampled from is derived from the model's own; see ops.tempered."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    min_p: float = 0.0
    min_p_first: bool = False  # min_p before top_k and top_p, as vLLM does; else after them


@dataclass(slots=True, frozen=True, kw_only=True)
class ForwardRequest:
    """What a forward pass must compute: names of `Outputs` fields, and the settings that these depend on."""

    names: frozenset[str] = frozenset({"logprobs"})
    choice_ids: tuple[int, ...] = ()  # tokens whose log-probabilities `choices` holds
    among_all: bool = False  # normalised over the whole vocabulary, not over choice_ids
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    jsd_beta: float = 0.5
    temperature: float = 1.0  # of the divergence
    divergence_top_k: int = 0  # likeliest tokens of the teacher that it distinguishes; 0: all
    likeliest: int = 0  # number of tokens that `likeliest` has at each place, of the divergence's temperature
    distribution: SamplingDistribution = SamplingDistribution()  # of log-probabilities and entropy
    entropy_gradient: bool = False
    router_loss: float = 0.0  # weight of the mixture-of-experts balance
    experts: ExpertUse = "ignore"


@dataclass(slots=True, frozen=True, kw_only=True)
class Objective:
    """What a learner needs from an algorithm: what to compute, the loss, and the unit that the loss sums over."""

    request: ForwardRequest
    loss: Callable[[Outputs, MicroBatch], Loss]
    unit: Unit
    group_size: int = 1
    separable: bool = False  # see Algorithm.separable


def count_units(samples: Sequence[Sample], unit: Unit) -> int:
    """Return the denominator of a batch: the number of its counted tokens, of its samples, or of its groups."""
    if unit == "token":
        return int(sum(sample.mask.sum() for sample in samples))
    if unit == "sample":
        return len(samples)
    return len({sample.group for sample in samples})


assert set(STREAMS) | set(SCALARS) <= {f.name for f in fields(Sample)} & {f.name for f in fields(MicroBatch)}
assert get_args(Unit) == ("token", "sample", "group")
