"""Evaluation of the policy on prompts it does not train on: mean@n and pass@k, with confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.statistics import half_width, pass_at
from posttrain.core.types import Prompt
from posttrain.engines.base import Generator, Sampling, seed_for
from posttrain.rollout.episodes import EpisodePlayer
from posttrain.rollout.records import Rollout
from posttrain.rollout.rollouts import by_group, generate_rollouts
from posttrain.rollout.scoring import RolloutScorer
from posttrain.train.callbacks import MetricFunctions, add_custom_metrics

CORRECT_ABOVE = 0.5  # a completion whose first reward is above this counts as correct
SEED_OF_EVALUATION = 0xE7A1  # keeps its random numbers apart from those of training


class HeldOutEval:
    """Generates and scores completions of the same prompts, with the same seeds, every time it runs."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: OnlineConfig,
        sampling: Sampling,
        scorer: RolloutScorer,
        tokenizer: Any,
        episodes: Callable[[Generator, Sampling], EpisodePlayer | None] = lambda *_: None,
        metric_functions: MetricFunctions = MappingProxyType({}),
    ) -> None:
        """`episodes`: returns what runs episodes with a generator, where there is an environment.

        `metric_functions`: custom metrics by name, functions of the scored rollouts.
        """
        self.metric_functions = metric_functions
        self.config, self.scorer, self.tokenizer, self.episodes = config.eval, scorer, tokenizer, episodes
        self.prompts, self.seed = prompts[: config.eval.max_examples or None], config.seed ^ SEED_OF_EVALUATION
        self.sampling = replace(sampling, temperature=config.eval.temperature, top_p=1.0, top_k=0, min_p=0.0)

    def run(self, generator: Generator) -> dict[str, float]:
        n = self.config.samples_per_prompt
        prompts = [(index, prompt) for index, prompt in enumerate(self.prompts) for _ in range(n)]
        seeds = [seed_for(self.seed, index, k) for index in range(len(self.prompts)) for k in range(n)]
        episodes = self.episodes(generator, self.sampling)
        if episodes is not None:
            rollouts = episodes.play(prompts, seeds)
        else:
            rollouts = generate_rollouts(generator, prompts, seeds, self.sampling, self.tokenizer)
        self.scorer.score(rollouts, training=False)
        return self.metrics(rollouts)

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return means over prompts; a completion that could not be scored is left out and counted as a failure."""
        scored = [rollout for rollout in rollouts if not rollout.failure]
        judged = [rollout for rollout in scored if self.scorer.first_reward(rollout) is not None]
        groups = [[self.is_correct(rollout) for rollout in group] for group in by_group(judged)]
        accuracies = [sum(correct) / len(correct) for correct in groups]
        found = {
            "reward": float(np.mean([rollout.sample.reward for rollout in scored])),
            "accuracy": float(np.mean(accuracies)) if accuracies else 0.0,
            "accuracy_interval": half_width(accuracies),
            "length": float(np.mean([rollout.completion_tokens for rollout in scored])),
            "truncated": float(np.mean([rollout.sample.finish == "length" for rollout in scored])),
            "failures": float(len(rollouts) - len(scored)),
        }
        k = 2
        while k <= self.config.samples_per_prompt:
            passed = [pass_at(k, len(correct), sum(correct)) for correct in groups if len(correct) >= k]
            found[f"pass@{k}"] = float(np.mean(passed))
            found[f"pass@{k}_interval"] = half_width(passed)
            k *= 2
        add_custom_metrics(self.metric_functions, scored, found)
        return found

    def is_correct(self, rollout: Rollout) -> bool:
        first = self.scorer.first_reward(rollout)
        return first is not None and first > CORRECT_ABOVE
