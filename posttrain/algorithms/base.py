"""The contracts between the training loops and the algorithms, and the registry of algorithms.

An algorithm declares which examples it trains on, what other models must compute for it, how it assigns credit over a
batch, and its loss. `Algorithm` is what the offline loop calls; `OnlineAlgorithm` adds what the online loop calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, TypeVar

from posttrain.core.errors import UsageError
from posttrain.core.types import (
    ExampleKind,
    ExpertUse,
    ForwardRequest,
    Head,
    Loss,
    MicroBatch,
    Objective,
    Outputs,
    Sample,
    SamplingDistribution,
    Unit,
)

ALGORITHMS: dict[str, type[Algorithm]] = {}
"""Verb -> algorithm; filled by `register`."""

A = TypeVar("A", bound="type[Algorithm]")


class Algorithm:
    """Defines what is trained on and what is minimised; each algorithm is a subclass in a file of its own.

    `assign_credit` runs on the controller over a whole batch; `loss` runs on the workers over a micro-batch.
    A subclass with options of its own declares a nested `Config` and the line `config: Config`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Options of the section `algo`."""

    config: Config

    name: ClassVar[str]
    help: ClassVar[str]
    """One line for `posttrain --help`."""
    example_kind: ClassVar[ExampleKind]
    """The kind of example it trains on."""
    group_size: ClassVar[int] = 1
    """Samples per example; they stay next to each other in one micro-batch."""
    min_batch_size: ClassVar[int] = 1
    """Smallest number of examples that an optimizer step can be computed from."""
    separable: ClassVar[bool] = False
    """Each token's part of the loss reads no other token's log-probability. Then logits are computed once, not twice;
    every step checks that this holds."""
    head: ClassVar[Head] = "token"
    """token: a language model; score: a head with one output on the same trunk."""
    online: ClassVar[bool] = False
    """Trains on completions that the policy generates for the examples' prompts (see OnlineAlgorithm)."""
    defaults: ClassVar[dict[str, Any]] = {}
    """Defaults of other sections that this algorithm changes, as {"train.learning_rate": 5e-7}."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.check()

    def check(self) -> None:
        """Raise UsageError where two options conflict; called before any model is loaded."""

    @property
    def unit(self) -> Unit:
        """What the loss is a sum over, and so what the learner divides by."""
        raise NotImplementedError

    @property
    def distribution(self) -> SamplingDistribution:
        """What the log-probabilities that the algorithm reads are of; the model's own distribution by default."""
        return SamplingDistribution()

    @property
    def experts(self) -> ExpertUse:
        """What the policy does with the experts that the sampler chose."""
        return "ignore"

    def is_separable(self) -> bool:
        """Whether the loss is separable with these options (see `separable`)."""
        return self.separable

    def outputs(self) -> set[str]:
        """Fields of `Outputs` that the loss reads."""
        return {"logprobs"}

    def needs(self) -> set[str]:
        """Streams that must be filled before `assign_credit`: ref_logprobs, logprobs, old_logprobs, values."""
        return set()

    def is_needed(self, stream: str, sample: Sample) -> bool:
        """Whether a stream of `needs` must be filled for this sample."""
        return True

    def reference_path(self) -> str:
        """Path of the reference model that fills ref_logprobs; empty: the policy at the start of training."""
        return ""

    def reference_sync_steps(self) -> int:
        """Move the reference towards the current policy every N steps; 0: the reference does not change."""
        return 0

    def reference_mixup_alpha(self) -> float:
        """Share of the policy in the weights of a moved reference; 1: the reference is replaced by the policy."""
        return 1.0

    def precompute_reference(self) -> bool:
        """Whether ref_logprobs of all examples are computed before training, so that the reference can be freed."""
        return False

    def teacher_path(self) -> str:
        """Path of the teacher, if there is one."""
        return ""

    def needs_margin(self) -> bool:
        """Whether every pair must have a margin."""
        return False

    def placeholder(self) -> str:
        """Text of the token that ends each step of a stepwise example."""
        return ""

    def stratum(self, sample: Sample) -> float:
        """Return a number by which examples are stratified: each value is spread evenly over the steps of an epoch."""
        return 0.0

    def prepare(self, samples: list[Sample]) -> list[Sample]:
        """Add samples that are needed only to assign credit; `assign_credit` removes them again."""
        return samples

    def assign_credit(self, samples: list[Sample]) -> list[Sample]:
        """Write what depends on the whole batch into the samples; return those to train on."""
        return samples

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        """Return the sum of the loss over the units of a micro-batch, and sums of metrics."""
        raise NotImplementedError

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        """Return what the forward pass must compute; `token_id` maps a text that is one token to its id."""
        names = frozenset(self.outputs())
        return ForwardRequest(names=names, distribution=self.distribution, experts=self.experts)

    def objective(self, request: ForwardRequest) -> Objective:
        """Return what a learner must know about this algorithm."""
        return Objective(
            request=request, loss=self.loss, unit=self.unit, group_size=self.group_size, separable=self.is_separable()
        )

    def annotations(self) -> dict[str, Any]:
        """Entries that users of the trained model need; written into its config.json."""
        return {}


@dataclass(slots=True, frozen=True, kw_only=True)
class RolloutSettings:
    """What a run decides about its completions and a loss must know."""

    max_completion_tokens: int = 0
    distribution: SamplingDistribution = SamplingDistribution()  # noqa: RUF009  frozen
    router_replay: bool = False  # train with the experts that the sampler chose


@dataclass(slots=True, frozen=True, kw_only=True)
class CriticSettings:
    """How an algorithm's critic is trained."""

    path: str  # where it starts; empty: at the first reward model, or else at the policy with a new head
    learning_rate: float
    loss: Callable[[Outputs, MicroBatch], Loss]  # a sum over tokens


@dataclass(slots=True, frozen=True, kw_only=True)
class TeacherSettings:
    """Teachers that are asked about completions before the update, and what they are asked."""

    teachers: tuple[str, ...]  # paths, addresses of services, or `self`
    names: tuple[str, ...] = ()  # values of `column` that select them; one teacher needs none
    column: str = ""
    context_column: str = ""  # of what teachers see in addition
    tokenizer: str = ""  # path of the teachers' tokenizer, if it is not the student's
    top_k: int = 0  # likeliest tokens to ask for; 0: the log-probability of the sampled token alone
    temperature: float = 1.0  # of the likeliest tokens
    service_model: str = ""  # name of the model behind an address
    api_key_env: str = ""
    timeout_seconds: float = 60.0


class OnlineAlgorithm(Algorithm):
    """An algorithm that trains on completions of its own policy; adds the calls that the online loop makes."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        epochs_per_batch: int = 1
        """Number of passes over each batch of completions."""
        mini_batch_size: int = 0
        """Completions per optimizer step; 0: the whole batch."""
        shuffle_mini_batch: bool = True
        """Draw mini-batches in random order."""
        mask_truncated_completions: bool = False
        """Leave completions that were truncated at rollout.max_tokens out of the loss; their rewards still count in the
        advantages of others."""

        def needs_reward(self) -> bool:
            """Whether something must score the completions."""
            return True

    config: Config

    example_kind = "prompt"
    online = True
    greedy_baseline: ClassVar[bool] = False
    """Needs the reward of the greedy completion of the same prompt in `sample.baseline`."""

    def __init__(self, config: Config, rollout: RolloutSettings = RolloutSettings()) -> None:  # noqa: B008  frozen
        self.rollout = rollout
        super().__init__(config)

    @property
    def distribution(self) -> SamplingDistribution:
        return self.rollout.distribution

    @property
    def experts(self) -> ExpertUse:
        return "replay" if self.rollout.router_replay else "compare"

    def several_updates(self) -> bool:
        """Whether the policy changes before the last update on a batch, so that old log-probabilities matter."""
        return self.config.epochs_per_batch > 1 or self.config.mini_batch_size > 0

    def min_samples_per_prompt(self) -> int:
        """Smallest number of completions per prompt that credit can be assigned to."""
        return 1

    def is_trained_on(self, sample: Sample) -> bool:
        """Whether a sample counts in the loss and in its denominator."""
        return not (self.config.mask_truncated_completions and sample.finish == "length")

    def trained_samples(self, samples: list[Sample], seed: tuple[int, ...]) -> list[Sample]:
        """Return the samples of a batch that the loss is computed on; one may be there several times."""
        return [sample for sample in samples if self.is_trained_on(sample)]

    def has_gradient(self, sample: Sample) -> bool:
        """Whether a sample contributes to the gradient; others are not computed."""
        return True

    def critic(self) -> CriticSettings | None:
        """Return the settings of a separate critic; None: no critic, or a value head on the policy."""
        return None

    def teachers(self) -> TeacherSettings | None:
        """Return the settings of teachers that are asked before the update; None: there are none."""
        return None

    def completion_column(self) -> str:
        """Return the column with the data's completions, which take the place of some generated ones; empty: none."""
        return ""

    def data_fraction(self) -> float:
        """Return the share of prompts whose completion is the data's."""
        return 0.0

    def policy_frozen(self, step: int) -> bool:
        """Whether only the critic is trained at this step (from 1)."""
        return False

    def pretrain_sources(self) -> list[tuple[tuple[str, ...], float]]:
        """Return groups of text files with the weight of each; their `pretrain_loss` is added to the policy's loss."""
        return []

    def pretrain_loss(self, out: Outputs, batch: MicroBatch, weight: float) -> Loss:
        """Return the weighted loss on texts, as a sum over their tokens."""
        raise NotImplementedError

    def after_step(self, metrics: dict[str, float], samples: int) -> None:
        """Adapt what changes from step to step; called after each step with its metrics and number of samples."""

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint must hold."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore what `state` returned."""


def check_reference_sync(steps: int, alpha: float, precomputed: bool = False) -> None:
    """Raise UsageError if a reference cannot follow the policy with these options."""
    if steps < 0:
        raise UsageError(f"algo.reference_sync_steps is {steps}: it must be at least 0")
    if not 0 < alpha <= 1:
        raise UsageError(f"algo.reference_mixup_alpha is {alpha}: it must be above 0 and at most 1")
    if alpha < 1 and not steps:
        raise UsageError(
            f"algo.reference_mixup_alpha is {alpha}, but algo.reference_sync_steps is 0: set that, or leave it out"
        )
    if steps and precomputed:
        raise UsageError(
            f"algo.reference_sync_steps is {steps}, but with algo.precompute_reference the reference is freed before "
            "training: leave one of them out"
        )


def example_kind(trainer: str) -> ExampleKind | None:
    """Return the kind of example that a trainer reads; None without a trainer."""
    if trainer and trainer not in ALGORITHMS:
        raise UsageError(f"trainer {trainer}: no such trainer; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[trainer].example_kind if trainer else None


def register(name: str, help: str) -> Callable[[A], A]:
    """Decorate a class: makes an algorithm the verb `name`, described by the line `help`."""

    def enter(cls: A) -> A:
        assert name not in ALGORITHMS, f"two algorithms named {name}"
        cls.name, cls.help = name, help
        ALGORITHMS[name] = cls
        return cls

    return enter


def groups(samples: list[Sample]) -> Iterator[list[Sample]]:
    """Yield consecutive samples that share a group, together."""
    for _, members in groupby(samples, key=lambda sample: sample.group):
        yield list(members)
