"""The process in which environments live: `python -m posttrain.rollout.environment_child REQUESTS REPLIES`.

As with reward functions (rewards/child.py): JSON lines in and out, and whatever Python can catch is caught here.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards.child import Catch, Outcome, Servant, import_place
from posttrain.rewards.signatures import number

ROLES = ("system", "user", "assistant", "tool")


class Host(Servant):
    """Holds an object of the user's class for each conversation that goes on."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self.kind: Any = None
        self.talks: dict[int, Any] = {}

    def _load(self, message: dict[str, Any]) -> None:
        with Catch() as caught:
            self.kind = load(message["spec"]["place"], message["spec"]["function"])
        if caught.error is None:
            self._reply({"batch": False})
        else:
            wrong_use = isinstance(caught.error, UsageError)
            self._reply({"fault": str(caught.error) if wrong_use else caught.text})

    def _answer(self, message: dict[str, Any]) -> None:
        """Events in order, of several conversations: each is a row to start with, or a reply of the model."""
        for talk in message["over"]:
            self.talks.pop(talk, None)
        for talk, event in message["events"]:
            outcome = self._event(talk, event)
            self._reply(outcome)
            if "fault" in outcome:
                self.talks.pop(talk, None)
                if "MemoryError" in outcome["fault"]:
                    self._reply({"retire": True})  # who knows how much is still held
                    return

    def _event(self, talk: int, event: dict[str, Any]) -> Outcome:
        self._start_clock()
        with Catch() as caught:
            if "row" in event:
                self.talks[talk] = environment = self.kind()
                return {"messages": opening(environment.start(event["row"])), "reward": 0.0}
            if talk not in self.talks:
                return {"fault": "it failed before"}
            messages, reward = after_step(self.talks[talk].step(event["reply"]))
            return {"messages": messages, "reward": reward}
        return {"fault": caught.text}


def load(place: str, name: str) -> Any:
    """The class; UsageError says what the user must mend."""
    module = import_place(place)
    if not hasattr(module, name):
        there = [key for key, value in vars(module).items() if inspect.isclass(value) and not key.startswith("_")]
        raise UsageError(f"{place} has no class {name!r}; it has {', '.join(there) or 'none'}")
    kind = getattr(module, name)
    if not inspect.isclass(kind):
        raise UsageError(f"{name} is a {type(kind).__name__}, not a class")
    methods = {"start": "start(row)", "step": "step(reply)"}
    lacking = [shape for method, shape in methods.items() if not callable(getattr(kind, method, None))]
    if lacking:
        raise UsageError(f"the class {name} has no {' and no '.join(lacking)}")
    try:
        inspect.signature(kind).bind()
    except TypeError as error:
        raise UsageError(f"{name}() is called without arguments, for each conversation: {error}") from None
    return kind


def opening(messages: Any) -> list[dict[str, str]]:
    if not messages:
        raise ValueError("start returned no messages: there is nothing to answer")
    return checked(messages, "start", ROLES)


def after_step(result: Any) -> tuple[list[dict[str, str]] | None, float]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"step returned {shown(result)}, not (messages, reward); to end: (None, reward)")
    messages, reward = result
    if messages is not None and not messages:
        raise ValueError("step returned no messages; None ends the conversation")
    of_environment = tuple(role for role in ROLES if role != "assistant")
    try:
        value = number(reward)
    except (TypeError, ValueError):
        raise ValueError(f"step returned the reward {shown(reward)}; it must be a finite number") from None
    return None if messages is None else checked(messages, "step", of_environment), value


def checked(messages: Any, method: str, roles: tuple[str, ...]) -> list[dict[str, str]]:
    """Messages of a role and a text, nothing else: that is what can be appended to a conversation."""
    if not isinstance(messages, list | tuple):
        raise TypeError(f"{method} returned {shown(messages)} where a list of messages belongs")
    for message in messages:
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise TypeError(f"{method} returned the message {shown(message)}; it must have role and content, no more")
        if message["role"] not in roles:
            raise ValueError(f"{method} returned the role {message['role']!r}; there are {', '.join(roles)}")
        if not isinstance(message["content"], str):
            raise TypeError(f"{method} returned the content {shown(message['content'])}; it must be text")
        message["content"].encode()  # half of a surrogate pair is no text, and no tokenizer takes it
    return [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]


def shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


if __name__ == "__main__":
    Host(int(sys.argv[1]), int(sys.argv[2])).run()
