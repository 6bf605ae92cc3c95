"""Environments of verifiers, which talk to the model themselves: `rollout.agent: verifiers:NAME`.

NAME is a package with `load_environment` (versions up to 0.3), or one with a taskset of its v1 API. The example's
`seed` is the number of the row or task, `options` are those of the environment. The reward is that of the rubric.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
from contextlib import AsyncExitStack
from typing import Any

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.rollout.foreign import options_of, seed_of

SPLITS = ("train", "eval")
KEY_VARIABLE = "OPENAI_API_KEY"  # the environment variable with the key of the conversation


class VerifiersError(PosttrainError):
    """An episode ended with an error of the environment, or of a request that it made."""


def load_program(name: str) -> VerifiersProgram:
    """Return what plays episodes of an environment; UsageError if the package or the environment is not there."""
    try:
        importlib.import_module("verifiers")
    except ModuleNotFoundError as error:
        raise UsageError(f"verifiers:{name} needs verifiers: pip install verifiers ({error})") from None
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"verifiers:{name}: there is no module {module}; install the environment's package first ({error})"
        ) from None
    program: VerifiersProgram = Environment(name) if hasattr(found, "load_environment") else Taskset(name)
    program.load({})
    return program


class VerifiersProgram:
    """Plays episodes of one environment, which is made once for each combination of options."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loaded: dict[str, Any] = {}  # by options, as JSON

    def load(self, options: dict[str, Any]) -> Any:
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self.loaded:
            self.loaded[key] = self.make(options)
        return self.loaded[key]

    def make(self, options: dict[str, Any]) -> Any:
        """Return an environment; UsageError if its episodes cannot be trained."""
        raise NotImplementedError

    async def play(self, example: dict[str, Any], request: dict[str, Any]) -> float:
        """Play the episode of an example with the endpoint that the request names, and return its reward."""
        raise NotImplementedError


class Environment(VerifiersProgram):
    """An environment of the classic API: SingleTurnEnv, MultiTurnEnv, ToolEnv, StatefulToolEnv and their subclasses."""

    def make(self, options: dict[str, Any]) -> Any:
        try:
            from verifiers import load_environment
        except (ImportError, AttributeError) as error:
            raise UsageError(
                f"verifiers:{self.name} has load_environment, of the classic API, which this version of verifiers does "
                f"not have; versions up to 0.3 do ({error})"
            ) from None
        made = load_environment(self.name, **options)
        if made.rubric.has_group_rewards:
            raise UsageError(
                f"verifiers:{self.name} has rewards that compare the episodes of a group; here each episode is scored "
                "by itself"
            )
        return made

    def row(self, environment: Any, example: dict[str, Any]) -> dict[str, Any]:
        split = example.get("split", SPLITS[0])
        if split not in SPLITS:
            raise UsageError(f"the column split of the example is {split!r}; it must be {' or '.join(SPLITS)}")
        rows = environment.get_dataset() if split == SPLITS[0] else environment.get_eval_dataset()
        if (seed := seed_of(example)) >= len(rows):
            raise UsageError(f"the seed of the example is {seed}; verifiers:{self.name} has {len(rows)} rows ({split})")
        return dict(rows[seed])

    async def play(self, example: dict[str, Any], request: dict[str, Any]) -> float:
        from openai import AsyncOpenAI
        from verifiers import OpenAIChatCompletionsClient

        environment = self.load(options_of(example))
        row = self.row(environment, example)
        async with AsyncOpenAI(
            base_url=request["base_url"], api_key=request["api_key"], timeout=request["seconds"], max_retries=0
        ) as client:
            state = await environment.rollout(
                row, OpenAIChatCompletionsClient(client), request["model"], environment.sampling_args
            )
            if state.get("error") is not None:
                raise VerifiersError(f"verifiers:{self.name}: {state['error']!r}") from state["error"]
            await environment.rubric.score_rollout(state)
            await environment.rubric.cleanup(state)
        return float(state["reward"])


class Taskset(VerifiersProgram):
    """A taskset of the v1 API with one agent, whose harness runs as a process of this machine unless told otherwise."""

    def make(self, options: dict[str, Any]) -> Any:
        try:
            from verifiers.v1.configs.agent import agent_config_fields
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise UsageError(
                f"verifiers:{self.name} has no load_environment, and this version of verifiers has no v1 API that is "
                f"known here; 0.4 has ({error})"
            ) from None
        config = {**options, "taskset": {**options.get("taskset", {}), "id": self.name}}
        seats = list(agent_config_fields(resolve_env_config(config)))
        if len(seats) != 1:
            raise UsageError(f"verifiers:{self.name} has the agents {', '.join(seats)}; here one agent is trained")
        config[seats[0]] = {"runtime": {"type": "subprocess"}, **config.get(seats[0], {})}
        return load_environment(resolve_env_config(config))

    def task(self, environment: Any, example: dict[str, Any]) -> Any:
        seed = seed_of(example)
        for task in itertools.islice(environment.taskset, seed, None):
            return task
        raise UsageError(f"the seed of the example is {seed}; verifiers:{self.name} has fewer tasks")

    async def play(self, example: dict[str, Any], request: dict[str, Any]) -> float:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig

        environment = self.load(options_of(example))
        task = self.task(environment, example)
        client = EvalClientConfig(base_url=request["base_url"], api_key_var=KEY_VARIABLE)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(environment.serving())
            context = ModelContext(model=request["model"], client=client)
            episode = await asyncio.wait_for(environment.run_episode(task, context), request["seconds"])
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise VerifiersError(f"verifiers:{self.name}: {errors[-1].message if errors else 'the episode failed'}")
        return float(sum(trace.reward for trace in episode.traces))
