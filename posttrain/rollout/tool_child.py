"""The process in which tools run: `python -m posttrain.rollout.tool_child REQUESTS REPLIES`, two pipes.

The parent's side is tools.py. An event is the example of a new conversation, or the calls of one reply; the results are
messages with the role `tool`. What a model got wrong is told to it; a tool that crashes or hangs ends its conversation.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rollout.mcp_client import McpServer
from posttrain.rollout.tool_schema import describe_function, problem_with
from posttrain.sandbox.programs import isolation, run_program
from posttrain.sandbox.request_loop import CatchAll, Reply, RequestLoop
from posttrain.sandbox.user_code import CodeLocation, import_location

RESULT_LIMIT = 2**16  # characters of the results of a reply's calls, each of which has an equal share
SHARE = 0.8  # of the time limit of a reply, for its programs and servers: they then fail before their process does

Call = Callable[[dict[str, Any]], str]
PYTHON = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}


class ToolRequestLoop(RequestLoop):
    """Calls functions, servers and the sandbox; of a conversation it keeps its servers, if it has some of its own."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self.schemas: dict[str, dict[str, Any]] = {}  # by name of the tool
        self.calls: dict[str, Call] = {}
        self.stateful: set[str] = set()  # names of tools whose servers belong to one conversation
        self.servers: dict[int, dict[str, McpServer]] = {}  # number of the conversation -> specification -> its server
        self.conversation = 0  # number of the current one
        self.deadline = 0.0  # for the programs and servers of the current reply, on the clock time.monotonic

    def load(self, request: dict[str, Any]) -> Reply:
        for tool in request["tools"]:
            if "place" in tool:
                self.add_function(CodeLocation(tool["place"], tool["name"]))
            elif "server" in tool:
                self.add_server(tool["server"], request["folder"], own=tool["own"])
            else:
                self.add_sandbox(request["allow_unprotected"])
        return {"tools": list(self.schemas.values())}

    def add(self, schema: dict[str, Any], call: Call) -> None:
        name = schema["function"]["name"]
        if name in self.schemas:
            raise UsageError(f"two tools have the name {name}")
        self.schemas[name], self.calls[name] = schema, call

    def add_function(self, location: CodeLocation) -> None:
        function = import_location(location, "function", inspect.isfunction)
        if not inspect.isfunction(function):
            raise UsageError(f"{location.name} is a {type(function).__name__}, not a function")

        def call(arguments: dict[str, Any]) -> str:
            with CatchAll() as caught:
                found = function(**arguments)
                if inspect.isawaitable(found):
                    found = asyncio.run(awaited(found))
                return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
            if isinstance(caught.error, MemoryError):
                raise caught.error
            return f"error: {type(caught.error).__name__}: {caught.error}"

        self.add(describe_function(function), call)

    def add_server(self, spec: str, folder: str, *, own: bool) -> None:
        """Add the tools of a server; `own`: each conversation has a server of its own."""
        shared = McpServer(spec, folder, SHARE * self.seconds)

        def server() -> McpServer:
            if not own:
                return shared
            servers = self.servers.setdefault(self.conversation, {})
            if spec not in servers:
                servers[spec] = shared.again()
            return servers[spec]

        for schema in shared.tools():
            name = schema["function"]["name"]

            def call(arguments: dict[str, Any], name: str = name) -> str:
                return server().call(name, arguments, self.seconds_left())

            self.add(schema, call)
            self.stateful |= {name} if own else set()
        if own:
            shared.close()

    def add_sandbox(self, allow_unprotected: bool) -> None:
        mode, problem = isolation()
        if mode == "unprotected" and not allow_unprotected:
            raise UsageError(
                f"programs that the model writes cannot be isolated on this machine: {problem}. docs/rewards.md lists "
                "what is needed; with reward.allow_unprotected_code they run with your user's permissions"
            )

        def call(arguments: dict[str, Any]) -> str:
            done = run_program(arguments["code"], "", self.deadline, allow_unprotected=allow_unprotected)
            if done.code is None:
                return "error: the program took too long or printed too much"
            return done.output + (f"{done.errors}\nerror: exit code {done.code}" if done.code else "")

        self.add(PYTHON, call)

    def serve(self, request: dict[str, Any]) -> None:
        """Handle events in order."""
        for conversation in request["ended"]:
            for server in self.servers.pop(conversation, {}).values():
                server.close()
        for self.conversation, event in request["events"]:
            self.start_clock()
            self.deadline = time.monotonic() + SHARE * self.seconds
            with CatchAll() as caught:
                if "example" in event:
                    result: Reply = {"messages": event["example"]["messages"], "reward": 0.0}
                else:
                    messages = self.results_of(event["reply"], event.get("known"))
                    result = {"messages": messages or None, "reward": 0.0}
            if caught.error is not None:
                result = {"error": caught.text}
            self.reply(result)
            if isinstance(caught.error, MemoryError):
                self.reply({"retire": True})
                return

    def seconds_left(self) -> float:
        """Return how long the calls of the current reply may still take."""
        return max(0.0, self.deadline - time.monotonic())

    def results_of(self, calls: list[dict[str, Any]], known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Run the calls of a reply; `known`: their results in a process that was lost.

        Then only calls of the conversation's own servers are made again, which brings these into the state they had.
        """
        limit = RESULT_LIMIT // max(1, len(calls))
        if known is None:
            return [self.result_of(call, limit) for call in calls]
        return [
            self.result_of(call, limit) if call["name"] in self.stateful else result
            for call, result in zip(calls, known, strict=True)
        ]

    def result_of(self, call: dict[str, Any], limit: int) -> dict[str, Any]:
        """Run one call and return its result as a message, of at most `limit` characters."""
        text = self.run_call(call["name"], call["arguments"])
        text = text.encode("utf-8", "replace").decode()  # no tokenizer accepts unpaired surrogates
        if len(text) > limit:
            text = f"{text[:limit]}... ({len(text) - limit} characters are left out)"
        return {"role": "tool", "tool_call_id": call["id"], "name": call["name"], "content": text}

    def run_call(self, name: str, arguments: dict[str, Any]) -> str:
        if name not in self.schemas:
            return f"error: there is no tool {name}; there is {', '.join(self.schemas)}"
        if problem := problem_with(arguments, self.schemas[name]["function"].get("parameters", {})):
            return f"error: {problem}"
        if not self.seconds_left():
            return "error: not called: the calls before it took all the time"
        return self.calls[name](arguments)


async def awaited(found: Any) -> Any:
    return await found


if __name__ == "__main__":
    ToolRequestLoop(int(sys.argv[1]), int(sys.argv[2])).run()
