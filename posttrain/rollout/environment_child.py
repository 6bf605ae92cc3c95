"""The process in which environments run: `python -m posttrain.rollout.environment_child REQUESTS REPLIES`, two pipes.

The parent's side is environments.py. A request has events of several episodes; each event is answered by one reply.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards.signatures import finite_reward
from posttrain.rollout.foreign import CLASSES, load_environment
from posttrain.sandbox.request_loop import CatchAll, Reply, RequestLoop
from posttrain.sandbox.user_code import CodeLocation, import_location

ROLES = ("system", "user", "assistant", "tool")


class EnvironmentRequestLoop(RequestLoop):
    """Holds one object of the user's class for each episode that is not over."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self.environment_class: Any = None
        self.environments: dict[int, Any] = {}  # by number of the episode

    def load(self, request: dict[str, Any]) -> Reply:
        self.environment_class = load_class(CodeLocation(request["place"], request["name"]))
        return {}

    def serve(self, request: dict[str, Any]) -> None:
        """Handle events in order: each is the example of a new episode, or a reply of the model."""
        for episode in request["ended"]:
            self.environments.pop(episode, None)
        for episode, event in request["events"]:
            result = self._handle(episode, event)
            self.reply(result)
            if "error" in result:
                self.environments.pop(episode, None)
                if "MemoryError" in result["error"]:
                    self.reply({"retire": True})  # memory may still be held: the other episodes get a new process
                    return

    def _handle(self, episode: int, event: dict[str, Any]) -> Reply:
        self.start_clock()
        with CatchAll() as caught:
            if "example" in event:
                self.environments[episode] = environment = self.environment_class()
                messages = check_start(environment.start(event["example"]))
                return {"messages": messages, "reward": 0.0, "state": state_of(environment)}
            if episode not in self.environments:
                return {"error": "an earlier event of this episode failed"}
            environment = self.environments[episode]
            following, reward = check_step(environment.step(event["reply"]))
            state = "" if following is None else state_of(environment)
            return {"messages": following, "reward": reward, "state": state}
        return {"error": caught.text}


def load_class(location: CodeLocation) -> Any:
    """Import the class; a UsageError says what the user must change."""
    if location.place in CLASSES:
        return load_environment(location.place, location.name)
    found = import_location(location, "class", inspect.isclass)
    name = location.name
    if not inspect.isclass(found):
        raise UsageError(f"{name} is a {type(found).__name__}, not a class")
    methods = {"start": "start(example)", "step": "step(reply)"}
    missing = [signature for method, signature in methods.items() if not callable(getattr(found, method, None))]
    if missing:
        raise UsageError(f"the class {name} has no {' and no '.join(missing)}")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise UsageError(f"{name}() is called without arguments, once per episode: {error}") from None
    return found


def state_of(environment: Any) -> str:
    """Return what the environment says about its state; empty if it has no method `state`."""
    if not callable(found := getattr(environment, "state", None)):
        return ""
    state = found()
    if not isinstance(state, str) or not state:
        raise TypeError(f"state returned {shown(state)}; it must be a text that is not empty")
    return state


def check_start(messages: Any) -> list[dict[str, str]]:
    if not messages:
        raise ValueError("start returned no messages: the model has nothing to reply to")
    return check_messages(messages, "start", ROLES)


def check_step(result: Any) -> tuple[list[dict[str, str]] | None, float]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"step returned {shown(result)}, not (messages, reward); to end the episode: (None, reward)")
    messages, reward = result
    if messages is not None and not messages:
        raise ValueError("step returned an empty list of messages; None ends the episode")
    roles = tuple(role for role in ROLES if role != "assistant")
    try:
        value = finite_reward(reward)
    except (TypeError, ValueError):
        raise ValueError(f"step returned the reward {shown(reward)}; it must be a finite number") from None
    return None if messages is None else check_messages(messages, "step", roles), value


def check_messages(messages: Any, method: str, roles: tuple[str, ...]) -> list[dict[str, str]]:
    """Check that each message has a role and a text and nothing else, and return plain copies."""
    if not isinstance(messages, list | tuple):
        raise TypeError(f"{method} returned {shown(messages)}; expected a list of messages")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise TypeError(f"{method} returned the message {shown(message)}; it must have exactly role and content")
        if message["role"] not in roles:
            raise ValueError(f"{method} returned the role {message['role']!r}; it must be one of {', '.join(roles)}")
        if not isinstance(message["content"], str):
            raise TypeError(f"{method} returned the content {shown(message['content'])}; it must be text")
        message["content"].encode()  # fails for an unpaired surrogate, which no tokenizer accepts
    return [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]


def shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


if __name__ == "__main__":
    EnvironmentRequestLoop(int(sys.argv[1]), int(sys.argv[2])).run()
