"""Games of Gymnasium whose observations are text, or can be rendered as text: `rollout.environment: gymnasium:ID`."""

from __future__ import annotations

import importlib
import re
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rollout.foreign import Messages, options_of, seed_of, user_message, with_observation

NUMBER = re.compile(r"-?\d+")


class GymnasiumGame:
    """Plays one episode: the reply is the action, the observation is the next message, rewards are added up.

    An observation that is not text is shown as the game renders itself (render mode `ansi`), or else as `str` does.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def check(name: str) -> None:
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise UsageError(f"gymnasium:{name} needs Gymnasium: pip install gymnasium ({error})") from None
        module, _, game = name.rpartition(":")  # MODULE:ID imports the module that registers the game
        try:
            if module:
                importlib.import_module(module)
            spec = gymnasium.spec(game)
        except (gymnasium.error.Error, ModuleNotFoundError) as error:
            raise UsageError(f"gymnasium:{name}: {error}") from None
        env = gymnasium.make(spec)
        try:
            if not isinstance(env.action_space, gymnasium.spaces.Text | gymnasium.spaces.Discrete):
                raise UsageError(
                    f"gymnasium:{name} has actions of the kind {type(env.action_space).__name__}; a model can play "
                    "games with actions that are text, or a number of choices (Text, Discrete)"
                )
        finally:
            env.close()

    def start(self, example: dict[str, Any]) -> Messages:
        import gymnasium

        game = self.name.rpartition(":")[2]
        self.game: Any = gymnasium.make(game, **options_of(example))
        self.renders = "ansi" in (self.game.metadata.get("render_modes") or ())
        if self.renders:
            self.game.close()
            self.game = gymnasium.make(game, render_mode="ansi", **options_of(example))
        self.discrete = isinstance(self.game.action_space, gymnasium.spaces.Discrete)
        observation, _ = self.game.reset(seed=seed_of(example))
        return with_observation(example, self.as_text(observation))

    def as_text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        return str(self.game.render() if self.renders else observation)

    def step(self, reply: str) -> tuple[Messages | None, float]:
        action: Any = reply.strip()
        if self.discrete:
            space = self.game.action_space
            first, last = int(space.start), int(space.start + space.n) - 1
            numbers = NUMBER.findall(reply)
            action = int(numbers[-1]) if numbers else first - 1
            if not first <= action <= last:
                return user_message(f"Reply with a number from {first} to {last}."), 0.0
        observation, reward, terminated, truncated, _ = self.game.step(action)
        if terminated or truncated:
            self.game.close()
            return None, float(reward)
        return user_message(self.as_text(observation)), float(reward)
