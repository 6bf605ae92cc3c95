"""Tasks of reasoning-gym as environments of one turn: `rollout.environment: reasoning_gym:chain_sum`."""

from __future__ import annotations

import difflib
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rollout.foreign import Messages, options_of, seed_of, with_observation


class ReasoningGym:
    """Asks the question that reasoning-gym makes from the seed, and scores the reply as reasoning-gym does."""

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def check(name: str) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            raise UsageError(f"reasoning_gym:{name} needs reasoning-gym: pip install reasoning-gym ({error})") from None
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)[:5]
            raise UsageError(f"reasoning-gym has no task {name!r}; it has {', '.join(near)} ...")

    def start(self, example: dict[str, Any]) -> Messages:
        import reasoning_gym

        self.data = reasoning_gym.create_dataset(self.name, seed=seed_of(example), size=1, **options_of(example))
        self.entry = self.data[0]
        return with_observation(example, self.entry["question"])

    def step(self, reply: str) -> tuple[Messages | None, float]:
        """End the episode with the score of what is between <answer> and </answer>, or else of the whole reply."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(reply) if "<answer>" in reply else reply.strip()
        return None, float(self.data.score_answer(answer, self.entry))
