"""The process in which an agent runs: `python -m posttrain.rollout.agent_child REQUESTS REPLIES`, two pipes.

The parent's side is agents.py. A request is one conversation: the function is called, or the command is run, with an
example and the address of the endpoint; the reply has its rewards.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards.signatures import finite_reward
from posttrain.rollout.foreign import ForeignAgent, load_agent
from posttrain.sandbox.request_loop import CatchAll, Reply, RequestLoop
from posttrain.sandbox.user_code import CodeLocation, import_location

TAIL = 2000  # characters of a command's output in an error
TURNS = "turns"  # name of a list of rewards: one for each reply of the model
NAMED = ("base_url", "api_key", "model", "client")  # what a function may ask for by the names of its parameters


class AgentRequestLoop(RequestLoop):
    """Runs one conversation after another."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self.run_agent: Callable[[dict[str, Any]], Any] = lambda _: None
        self.threads = 0  # that run after loading
        self.loop = asyncio.Runner()  # one for all conversations: a client of the module may keep connections open

    def load(self, request: dict[str, Any]) -> Reply:
        # Programs may make their client when they are imported.
        os.environ |= endpoint_variables(request)
        os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"  # it would send every conversation to OpenAI
        if "command" in request:
            command, folder = request["command"], request["folder"]
            self.run_agent = lambda asked: run_command(command, folder, asked)
        elif "package" in request:
            agent = load_agent(request["package"], request["name"])
            self.run_agent = lambda asked: self.play(agent, asked)
        else:
            function, names = load_function(CodeLocation(request["place"], request["name"]))
            self.run_agent = lambda asked: self.call(function, names, asked)
        self.threads = threading.active_count()
        return {}

    def serve(self, request: dict[str, Any]) -> None:
        self.start_clock()
        with CatchAll() as caught:
            reply: Reply = read_rewards(self.run_agent(request))
        if caught.error is not None:
            reply = {"error": caught.text}
        self.reply({**reply, "threads_left": threading.active_count() > self.threads})

    def play(self, agent: ForeignAgent, request: dict[str, Any]) -> Any:
        """Play an episode of another package's environment."""
        os.environ |= endpoint_variables(request)
        return self.loop.run(awaited(agent.play(request["example"], request)))

    def call(self, function: Any, names: tuple[str, ...], request: dict[str, Any]) -> Any:
        """Call the function with the example and what it asks for; run it to its end if it is asynchronous."""
        asynchronous = inspect.iscoroutinefunction(function)
        os.environ |= endpoint_variables(request)
        given = {name: request[name] for name in names if name != "client"}
        if "client" in names:
            given["client"] = make_client(request, asynchronous)
        found = function(request["example"], **given)
        if inspect.isawaitable(found):
            return self.loop.run(awaited(found))
        return found


async def awaited(found: Any) -> Any:
    return await found


def endpoint_variables(request: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables by which OpenAI's clients find the endpoint."""
    return {
        "OPENAI_BASE_URL": request["base_url"],
        "OPENAI_API_KEY": request["api_key"],
        "OPENAI_MODEL": request["model"],
    }


def make_client(request: dict[str, Any], asynchronous: bool) -> Any:
    import openai

    make = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    return make(base_url=request["base_url"], api_key=request["api_key"], timeout=request["seconds"], max_retries=0)


def load_function(location: CodeLocation) -> tuple[Any, tuple[str, ...]]:
    """Import the function; return it with the names that it asks for. A UsageError says what the user must change."""
    found = import_location(location, "function", callable)
    if not callable(found):
        raise UsageError(f"{location.name} is a {type(found).__name__}, not a function")
    parameters = list(inspect.signature(found).parameters.values())
    expected = f"expected {location.name}(example), and any of {', '.join(NAMED)} after it"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional or parameters[0].name in NAMED:
        raise UsageError(f"{location.name} does not take an example: {expected}")
    names = [p.name for p in parameters[1:] if p.kind in (*positional[1:], inspect.Parameter.KEYWORD_ONLY)]
    unknown = [p.name for p in parameters[1:] if p.name not in NAMED and p.default is p.empty and p.name in names]
    if unknown:
        raise UsageError(f"{location.name} has the parameter {unknown[0]}, which nothing is known for: {expected}")
    if "client" in names:
        try:
            import openai  # noqa: F401
        except ModuleNotFoundError:
            raise UsageError(
                f"{location.name} asks for a client, which needs the openai package: pip install openai, or ask for "
                "base_url and api_key instead"
            ) from None
    return found, tuple(name for name in names if name in NAMED)


def run_command(command: list[str], folder: str, request: dict[str, Any]) -> Any:
    """Run the command with the example as JSON in its standard input; its last line of output is the reward."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, **endpoint_variables(request)}
    example = json.dumps(request["example"]).encode()
    try:
        done = subprocess.run(command, input=example, capture_output=True, cwd=folder, env=environment)
    except OSError as error:
        raise UsageError(f"{command[0]}: {error.strerror or error}") from None
    output, errors = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    if done.returncode:
        raise UsageError(f"the command ended with exit code {done.returncode}; its output ends:\n{errors[-TAIL:]}")
    lines = output.strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        raise UsageError(
            f"the last line that the command printed is {lines[-1][:200]!r}; it must be the reward: a number, or a "
            "JSON object of numbers"
        ) from None


def read_rewards(found: Any) -> Reply:
    """Return the rewards by name: `` for a number; None if the agent has none of its own; and those of single turns."""
    if found is None:
        return {"rewards": None}
    named = dict(found) if isinstance(found, dict) else {"": found}
    turns = named.pop(TURNS) if isinstance(named.get(TURNS), list | tuple) else None
    try:
        rewards = {str(name): finite_reward(value) for name, value in named.items()}
        if turns is None:
            return {"rewards": rewards}
        of_turns = [finite_reward(value) for value in turns]
    except (TypeError, ValueError):
        shown = repr(named.get("", found))[:200]
        raise UsageError(
            f"the agent returned {shown}; expected a finite number, a dictionary of them, or None"
        ) from None
    return {"rewards": {**rewards, TURNS: sum(of_turns)}, "turn_rewards": of_turns}


if __name__ == "__main__":
    AgentRequestLoop(int(sys.argv[1]), int(sys.argv[2])).run()
