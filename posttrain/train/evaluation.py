"""How good a policy is on prompts it does not train on: mean@n and pass@k, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.types import Prompt, Sample
from posttrain.engines.base import GenerationRequest, Generator, OnCompletion, Sampling, seed_for
from posttrain.rollout.episodes import EpisodeRunner
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import by_group, generate_rollouts
from posttrain.rollout.scoring import RolloutScorer

RIGHT = 0.5  # an answer whose first reward is above this counts as right
EXAMINATION = 0xE7A1  # keeps its random numbers apart from those of training


class Speaker(Protocol):
    """A policy that can answer with the weights of now."""

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, current: bool = False
    ) -> list[Sample]: ...


class Examination:
    """The same prompts and the same random numbers every time it is held."""

    def __init__(
        self,
        config: OnlineConfig,
        sampling: Sampling,
        scorer: RolloutScorer,
        tokenizer: Any,
        dialogues: Callable[[Generator, Sampling], EpisodeRunner | None] = lambda *_: None,
    ) -> None:
        """`dialogues`: who plays, for a given policy and sampling, where there are environments."""
        self.config, self.scorer, self.tokenizer, self.dialogues = config.eval, scorer, tokenizer, dialogues
        self.seed = config.seed
        self.sampling = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)

    def hold(self, policy: Speaker, prompts: Sequence[Prompt]) -> dict[str, float]:
        prompts, n = prompts[: self.config.max_rows], self.config.samples_per_prompt
        asked = [(place, prompt) for place, prompt in enumerate(prompts) for _ in range(n)]
        seeds = [seed_for(self.seed ^ EXAMINATION, place, k) for place in range(len(prompts)) for k in range(n)]
        examinee = Examinee(policy)
        conversation = self.dialogues(examinee, self.sampling)
        if conversation is not None:
            rollouts = conversation.play(asked, seeds)
        else:
            rollouts = generate_rollouts(examinee, asked, seeds, self.sampling, self.tokenizer)
        self.scorer.score(rollouts, training=False)
        return self.figures(rollouts)

    def figures(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Means over prompts; an answer that could not be scored is left out and counted."""
        scored = [rollout for rollout in rollouts if not rollout.failure]
        groups = [[self.is_right(rollout) for rollout in group] for group in by_group(scored)]
        accuracies = [sum(right) / len(right) for right in groups]
        found = {
            "reward": float(np.mean([rollout.sample.reward for rollout in scored])),
            "accuracy": float(np.mean(accuracies)),
            "accuracy_interval": half_width(accuracies),
            "length": float(np.mean([rollout.completion_tokens for rollout in scored])),
            "truncated": float(np.mean([rollout.sample.finish == "length" for rollout in scored])),
            "failures": float(len(rollouts) - len(scored)),
        }
        k = 2
        while k <= self.config.samples_per_prompt:
            passed = [pass_at(k, len(right), sum(right)) for right in groups if len(right) >= k]
            found[f"pass@{k}"] = float(np.mean(passed))
            found[f"pass@{k}_interval"] = half_width(passed)
            k *= 2
        return found

    def is_right(self, rollout: Rollout) -> bool:
        return next(iter(rollout.rewards.values())) > RIGHT


class Examinee:
    """The policy with the weights of now, whatever batches are being made ahead."""

    def __init__(self, policy: Speaker) -> None:
        self.policy = policy

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        return self.policy.generate(requests, sampling, current=True)


def pass_at(k: int, n: int, right: int) -> float:
    """Chance that one of k answers is right, from n of which `right` were, without bias (arXiv:2107.03374, eq. 1)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def half_width(values: Sequence[float]) -> float:
    """Of the 95% confidence interval of their mean."""
    return 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
