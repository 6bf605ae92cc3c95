"""Environments of other packages, run unchanged: `reasoning_gym:NAME`, `gymnasium:ID`, `openenv:URL`, `verifiers:NAME`.

Each package is imported in one module here, which makes a class with `start` and `step` of it, or, where environments
talk to the model themselves, an agent. The package has the task; the data file has the instructions (`prompt`), the
`seed` of each episode, and `options` of the package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from posttrain.core.errors import UsageError

CLASSES = {
    "reasoning_gym": ("posttrain.rollout.foreign.reasoning_gym", "ReasoningGym"),
    "gymnasium": ("posttrain.rollout.foreign.gymnasium", "GymnasiumGame"),
    "openenv": ("posttrain.rollout.foreign.openenv", "OpenEnv"),
}

AGENTS = {"verifiers": "posttrain.rollout.foreign.verifiers"}  # packages whose environments are agents

Messages = list[dict[str, str]]


class ForeignEnvironment(Protocol):
    """An environment of another package, by the name that the package has for it."""

    def __init__(self, name: str) -> None: ...

    @staticmethod
    def check(name: str) -> None:
        """Raise UsageError if the package is not installed or has no such environment."""

    def start(self, example: dict[str, Any]) -> Messages: ...

    def step(self, reply: str) -> tuple[Messages | None, float]: ...


class ForeignAgent(Protocol):
    """An environment of another package that talks to the model itself."""

    async def play(self, example: dict[str, Any], request: dict[str, Any]) -> float:
        """Play the episode of an example with the endpoint that the request names, and return its reward."""


def split_spec(spec: str) -> tuple[str, str] | None:
    """Return (package, name) if `spec` names an environment of a package; None for a class of the user."""
    package, _, name = spec.partition(":")
    return (package, name) if package in CLASSES and name else None


def split_agent(spec: str) -> tuple[str, str] | None:
    """Return (package, name) if `spec` names an environment of a package that is an agent."""
    package, _, name = spec.partition(":")
    return (package, name) if package in AGENTS and name else None


def load_agent(package: str, name: str) -> ForeignAgent:
    """Return the agent; called in the child process. UsageError if there is none of this name."""
    found: ForeignAgent = importlib.import_module(AGENTS[package]).load_program(name)
    return found


def load_environment(package: str, name: str) -> Callable[[], ForeignEnvironment]:
    """Return what makes an environment; called in the child process. UsageError if there is none of this name."""
    module, class_name = CLASSES[package]
    found: type[ForeignEnvironment] = getattr(importlib.import_module(module), class_name)
    found.check(name)
    return partial(found, name)


def with_observation(example: dict[str, Any], observation: str) -> Messages:
    """Return the prompt of the example, the instructions, with the observation at the end of its last message."""
    *before, last = [{"role": str(m["role"]), "content": str(m["content"])} for m in example["messages"]]
    return [*before, {**last, "content": f"{last['content']}\n\n{observation}"}]


def seed_of(example: dict[str, Any]) -> int:
    """Return the column `seed`, by which a package makes the episode."""
    seed = example.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(
            f"the column seed of the example is {seed!r}; it must be a whole number from 0, from which the "
            "episode is made"
        )
    return seed


def options_of(example: dict[str, Any]) -> dict[str, Any]:
    """Return the column `options`: options of the package for this episode, by its own names."""
    options = example.get("options") or {}
    if not isinstance(options, dict):
        raise UsageError(f"the column options of the example is {options!r}; it must be an object")
    return options


def user_message(text: str) -> Messages:
    return [{"role": "user", "content": text}]
