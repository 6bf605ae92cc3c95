"""On-policy distillation: the student generates, and a teacher's distribution teaches it token by token.

Two forms. `divergence` minimises the divergence of the two next-token distributions at every token of the student's own
completions (GKD, arXiv:2306.13649); it is computed where the logits are. `policy_gradient` gives each token the reward
log(teacher / student), whose expectation is minus the reverse KL; it needs only the teacher's log-probabilities of the
sampled tokens. Both can be mixed with rewards, whose advantages are those of GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from posttrain.algorithms.base import TeacherSettings, register
from posttrain.algorithms.distill import check_divergence
from posttrain.algorithms.grpo import GRPO
from posttrain.algorithms.policy import as_stream, bounded_kl, check_bounds, token_kl, token_mean
from posttrain.core.errors import UsageError
from posttrain.core.lazy import torch
from posttrain.core.ops import discounted, kl_estimate
from posttrain.core.types import ForwardRequest, Loss, MicroBatch, Outputs, Sample, SamplingDistribution

SELF = "self"  # the policy as its own teacher


@register("opd", help="on-policy distillation: the student generates, a teacher's distribution teaches every token")
class OPD(GRPO):
    """Minimises the divergence from a teacher on the student's own completions, alone or beside rewards."""

    @dataclass(kw_only=True, slots=True)
    class Config(GRPO.Config):
        teacher: str = ""
        """Path of the teacher model, the address of a service (http://HOST:PORT/v1), or `self`: the policy itself, with
        algo.teacher_context_column. Required, unless algo.teachers is set."""
        teachers: tuple[str, ...] = ()
        """Several teachers instead of algo.teacher; each prompt's own is named in algo.teacher_column."""
        teacher_names: tuple[str, ...] = ()
        """Values of algo.teacher_column, one for each of algo.teachers."""
        teacher_column: str = "teacher"
        """Column of the data that names a prompt's teacher, with algo.teachers."""
        teacher_context_column: str = ""
        """Column with what the teacher sees and the student does not: a text, put before the last user message, or
        messages that replace the prompt."""
        teacher_tokenizer: str = ""
        """Path of the teacher's tokenizer, if it is not the student's: both are aligned over the text."""
        teacher_model: str = ""
        """Name of the model behind an address; empty: the service has only one."""
        teacher_api_key_env: str = ""
        """Environment variable with the key of the service."""
        teacher_timeout_seconds: float = 60.0
        """Longest time for one request to the service, with its repetitions."""
        student_fraction: float = 1.0
        """Share of prompts that the student completes; for the others the completion of algo.completion_column is
        learned (the mixture of GKD)."""
        completion_column: str = ""
        """Column with the data's completion of a prompt, a text."""
        objective: Literal["divergence", "policy_gradient"] = "divergence"
        """divergence: minimise the divergence over the vocabulary at every token; policy_gradient: give every token the
        reward log(teacher / student) of its own probability."""
        divergence: Literal["reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
        """reverse_kl: KL(student || teacher), mode-seeking; forward_kl: KL(teacher || student); jsd: generalised
        Jensen-Shannon divergence, between the two."""
        jsd_beta: float = 0.5
        """Weight of the teacher in the mixture distribution of jsd."""
        temperature: float = 1.0
        """Temperature of the teacher's and the student's distributions in the divergence."""
        divergence_top_k: int = 0
        """Compare the teacher's N likeliest tokens and all others as one; 0: the whole vocabulary."""
        divergence_clip: float = 0.0
        """Clip the divergence of a token, or its log(teacher / student), to at most this size; 0: no bound."""
        distill_coef: float = 1.0
        """Weight of the divergence from the teacher."""
        reward_coef: float = 0.0
        """Weight of the rewards' advantages; 0: rewards, if there are any, are only measured."""
        gamma: float = 0.0
        """Discount factor per token of log(teacher / student) in policy_gradient; 0: a token gets only its own."""

        def needs_reward(self) -> bool:
            return self.reward_coef > 0

    config: Config

    defaults: ClassVar[dict[str, Any]] = GRPO.defaults | {
        "train.learning_rate": 1e-5,
        "rollout.samples_per_prompt": 1,
    }

    def check(self) -> None:
        super().check()
        config = self.config
        check_teachers(config)
        check_divergence(
            config.teacher or " ".join(config.teachers), config.jsd_beta, config.temperature, config.divergence_top_k
        )
        self.check_asked()
        check_bounds(0, distill_coef=config.distill_coef, reward_coef=config.reward_coef)
        check_bounds(0, divergence_clip=config.divergence_clip)
        check_bounds(0, 1, gamma=config.gamma)
        if config.kl_coef:
            raise UsageError(
                f"algo.kl_coef is {config.kl_coef}, but opd has a teacher in the place of a reference: leave it out; "
                "algo.distill_coef is the weight of the teacher"
            )
        if not config.distill_coef:
            raise UsageError("algo.distill_coef is 0, so that the teacher would not be used: train with posttrain grpo")
        if config.objective == "divergence" and not config.reward_coef and self.has_entropy_bonus():
            raise UsageError(
                f"algo.entropy_coef is {config.entropy_coef}, algo.entropy_target {config.entropy_target}, but "
                "the loss is the divergence alone: leave them out, or set algo.reward_coef"
            )
        if config.objective == "policy_gradient":
            given = {"divergence": "reverse_kl", "temperature": 1.0, "divergence_top_k": 0}
            for name, default in given.items():
                if (value := getattr(config, name)) != default:
                    raise UsageError(
                        f"algo.{name} is {value}, but algo.objective policy_gradient reads the sampled token's "
                        "probability alone: leave it out, or set algo.objective to divergence"
                    )
        elif config.gamma:
            raise UsageError(
                f"algo.gamma is {config.gamma}, but algo.objective divergence has no rewards of tokens: leave it out, "
                "or set algo.objective to policy_gradient"
            )

    def check_asked(self) -> None:
        """Raise UsageError if teachers cannot be asked what the objective needs."""
        config = self.config
        if not self.teachers():
            return
        asked = "several teachers, a service, `self`, algo.teacher_context_column and algo.teacher_tokenizer"
        if config.objective == "divergence" and not config.divergence_top_k:
            raise UsageError(
                f"algo.divergence_top_k is 0, but {asked} are asked for their likeliest tokens before the update: set "
                "algo.divergence_top_k, such as 20, or algo.objective to policy_gradient"
            )
        if config.teacher_tokenizer and config.objective == "divergence":
            raise UsageError(
                f"algo.teacher_tokenizer is {config.teacher_tokenizer}: distributions over different tokens cannot be "
                "compared, only the probabilities of the same text: set algo.objective to policy_gradient"
            )
        remote = [path for path in (config.teacher, *config.teachers) if is_address(path)]
        if remote and config.objective == "divergence" and config.temperature != 1.0:
            raise UsageError(
                f"algo.temperature is {config.temperature}, but {remote[0]} returns probabilities at temperature 1: "
                "leave it out"
            )
        if remote and config.objective == "policy_gradient" and self.distribution != SamplingDistribution():
            raise UsageError(
                f"{remote[0]} returns probabilities of the model's own distribution, but rollout samples from another: "
                "set rollout.temperature to 1, and leave out rollout.top_p, rollout.top_k and rollout.min_p"
            )

    def min_samples_per_prompt(self) -> int:
        return 2 if self.config.reward_coef else 1

    def needs(self) -> set[str]:
        asks_reference = self.by_policy_gradient and not self.teachers()
        return super().needs() | ({"ref_logprobs"} if asks_reference else set())

    def teachers(self) -> TeacherSettings | None:
        config = self.config
        special = is_address(config.teacher) or config.teacher == SELF
        if not (special or config.teachers or config.teacher_context_column or config.teacher_tokenizer):
            return None
        return TeacherSettings(
            teachers=config.teachers or (config.teacher,),
            names=config.teacher_names,
            column=config.teacher_column if config.teachers else "",
            context_column=config.teacher_context_column,
            tokenizer=config.teacher_tokenizer,
            top_k=0 if self.by_policy_gradient else config.divergence_top_k,
            temperature=config.temperature,
            service_model=config.teacher_model,
            api_key_env=config.teacher_api_key_env,
            timeout_seconds=config.teacher_timeout_seconds,
        )

    def completion_column(self) -> str:
        return self.config.completion_column

    def data_fraction(self) -> float:
        return 1.0 - self.config.student_fraction

    @property
    def by_policy_gradient(self) -> bool:
        return self.config.objective == "policy_gradient"

    def reference_path(self) -> str:
        """Return the teacher, if only its log-probabilities of the sampled tokens are needed."""
        return self.config.teacher if self.by_policy_gradient and not self.teachers() else ""

    def teacher_path(self) -> str:
        return "" if self.by_policy_gradient or self.teachers() else self.config.teacher

    def outputs(self) -> set[str]:
        if self.by_policy_gradient:
            return super().outputs()
        return {"divergence"} | (super().outputs() if self.config.reward_coef else set())

    def forward_request(self, token_id: Callable[[str], int]) -> ForwardRequest:
        config = self.config
        return replace(
            super().forward_request(token_id),
            divergence=config.divergence,
            jsd_beta=config.jsd_beta,
            temperature=config.temperature,
            divergence_top_k=config.divergence_top_k,
        )

    def compute_advantages(self, samples: list[Sample]) -> None:
        super().compute_advantages(samples)
        config = self.config
        for sample in samples:
            assert sample.advantages is not None
            sample.advantages = sample.advantages * np.float32(config.reward_coef)
            if self.by_policy_gradient:
                gain = -bounded_kl(token_kl(sample, "k1"), config.divergence_clip)
                sample.advantages += as_stream(sample, config.distill_coef * discounted(gain, config.gamma))

    def has_gradient(self, sample: Sample) -> bool:
        return not self.by_policy_gradient or super().has_gradient(sample)

    def loss(self, out: Outputs, batch: MicroBatch) -> Loss:
        if self.by_policy_gradient:
            assert out.logprobs is not None and batch.ref_logprobs is not None
            loss = super().loss(out, batch)
            log_ratio = (out.logprobs.detach() - batch.ref_logprobs)[batch.counted]
            loss.metrics["divergence"] = token_mean(kl_estimate(log_ratio, "k3"))
            return loss
        assert out.divergence is not None
        divergence = out.divergence[batch.counted]
        taught = divergence.clamp(max=self.config.divergence_clip or math.inf)
        total = self.config.distill_coef * self.aggregate(taught, batch)
        loss = super().loss(out, batch) if self.config.reward_coef else Loss(total=torch.zeros_like(total))
        loss.total = loss.total + total
        loss.metrics["divergence"] = token_mean(divergence.detach())
        return loss


def is_address(path: str) -> bool:
    """Whether a teacher is a service."""
    return path.startswith(("http://", "https://"))


def check_teachers(config: OPD.Config) -> None:
    """Raise UsageError if options that select teachers or completions conflict."""
    if config.teachers and config.teacher:
        raise UsageError(f"algo.teacher is {config.teacher} and algo.teachers is set, too: leave one of them out")
    if len(config.teachers) != len(config.teacher_names):
        raise UsageError(
            f"algo.teacher_names has {len(config.teacher_names)} names for {len(config.teachers)} algo.teachers. "
            "Give one each."
        )
    if len(set(config.teacher_names)) < len(config.teacher_names):
        raise UsageError(f"algo.teacher_names {' '.join(config.teacher_names)}: a name is given twice")
    if SELF in (config.teacher, *config.teachers) and not config.teacher_context_column:
        raise UsageError(
            "algo.teacher is self, but without algo.teacher_context_column teacher and student would see the same: set "
            "it to the column with what only the teacher sees"
        )
    addressed = any(is_address(path) for path in (config.teacher, *config.teachers))
    for name in ("teacher_model", "teacher_api_key_env"):
        if (value := getattr(config, name)) and not addressed:
            raise UsageError(f"algo.{name} is {value}, but algo.teacher is not an address: leave it out")
    check_bounds(0, 1, student_fraction=config.student_fraction)
    check_bounds(0, teacher_timeout_seconds=config.teacher_timeout_seconds)
    if (config.student_fraction < 1) != bool(config.completion_column):
        raise UsageError(
            f"algo.student_fraction is {config.student_fraction} and algo.completion_column is "
            f"{config.completion_column!r}: the mixture needs both, a fraction below 1 and the data's completions"
        )
    if config.student_fraction < 1 and (config.objective == "policy_gradient" or config.reward_coef):
        raise UsageError(
            f"algo.student_fraction is {config.student_fraction}: the data's completions were not sampled from the "
            "student, so a policy gradient on them would be wrong: set algo.objective to divergence and "
            "algo.reward_coef to 0"
        )
