"""Tools that the model may call: functions, MCP servers, the code sandbox, in child processes; the parent's side.

A conversation goes on as long as replies have calls: their results are appended, and the model replies again. Its calls
are read by the format of the chat template. Reward functions score the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.data.encoding.tokens import whole_tokens
from posttrain.data.encoding.tool_formats import (
    FORMATS,
    THINK,
    format_of,
    parse_message,
    without_dropped_reasoning,
    writes_reasoning,
)
from posttrain.data.reading.examples import Message
from posttrain.engines.base import Generator, Sampling
from posttrain.rollout.conversations import normalised_message
from posttrain.rollout.environments import EnvironmentProcess, Environments
from posttrain.rollout.episodes import EpisodeRunner, TokenizedEpisode
from posttrain.rollout.mcp_client import PREFIX, SESSION_PREFIX
from posttrain.rollout.records import TOOLS_FAILED, Rollout
from posttrain.sandbox.process import ProcessLimits
from posttrain.sandbox.supervisor import StopFlag
from posttrain.sandbox.user_code import parse_location

MOST_SERVERS = 32  # conversations with servers of their own at a time, unless rollout.max_concurrent_episodes is set
SANDBOX = "sandbox"  # the tool that runs Python programs of the model
PROMPT_END = 8  # tokens of a prompt's end, in which <think> is looked for


class ToolProcess(EnvironmentProcess):
    """Runs the calls of many conversations.

    Where no tool keeps a state, a new process goes on with the next call. Where conversations have servers of their
    own, it first makes the earlier calls of these again.
    """

    module = "posttrain.rollout.tool_child"

    def __init__(self, request: dict[str, Any], name: str, limits: ProcessLimits, stop_flag: StopFlag) -> None:
        super().__init__(request, name, limits, stop_flag)
        self.repeats = has_own_servers(request["tools"])


class Tools(Environments):
    """Runs tools in child processes; a context manager, which ends them."""

    process_class = ToolProcess
    noun = "conversations"

    def __init__(self, specs: Sequence[str], *, allow_unprotected: bool = False, **limits: Any) -> None:
        """`specs`: values of rollout.tools; `allow_unprotected`: programs may run where they cannot be isolated."""
        tools = [parse_tool(spec) for spec in specs]
        self.has_own_servers = has_own_servers(tools)
        request = {"tools": tools, "folder": str(Path.cwd()), "allow_unprotected": allow_unprotected}
        self.schemas: list[dict[str, Any]] = []
        self.start(f"rollout.tools {' '.join(specs)}", request, **limits)

    def check(self) -> None:
        """Raise a UsageError if a tool cannot be loaded; learn what the others are called."""
        super().check()
        self.schemas = self.processes[0].loaded["tools"]


def parse_tool(spec: str) -> dict[str, Any]:
    """Return the part of a load request for one value of rollout.tools; UsageError if it names nothing."""
    where = f"rollout.tools {spec!r}"
    if spec == SANDBOX:
        return {}
    if prefix := next((prefix for prefix in (PREFIX, SESSION_PREFIX) if spec.startswith(prefix)), ""):
        if not (server := spec.removeprefix(prefix).strip()):
            raise UsageError(f"{where}: expected {prefix}COMMAND or {prefix}http://...")
        return {"server": server, "own": prefix == SESSION_PREFIX}
    if ":" not in spec:
        raise UsageError(f"{where}: expected FILE.py:FUNCTION, {PREFIX}COMMAND, {PREFIX}http://... or {SANDBOX}")
    return asdict(parse_location(spec, where, "function"))


def has_own_servers(tools: Sequence[dict[str, Any]]) -> bool:
    """Return whether a conversation has servers of its own."""
    return any(tool.get("own") for tool in tools)


class ToolRunner(EpisodeRunner):
    """Plays conversations with tools, concurrently or in lock step as episodes with environments are."""

    def __init__(
        self, tools: Tools, policy: Generator, config: OnlineConfig, sampling: Sampling, tokenizer: Any
    ) -> None:
        super().__init__(tools, policy, config, sampling, tokenizer)
        self.tools = tools.schemas
        if tools.has_own_servers:
            self.most = self.most or MOST_SERVERS
        template = tokenizer.chat_template
        self.format, self.thinks = format_of(template), writes_reasoning(template)
        if self.format is None:
            raise UsageError(
                f"rollout.tools: the chat template writes no tool calls, or in a format that is not known; the formats "
                f"are {', '.join(format.name for format in FORMATS)}. Choose a template with --data.chat_template"
            )
        special = {
            token: tokenizer.convert_tokens_to_ids(token) for token in whole_tokens(tokenizer, control_only=True)
        }
        marks = {special[mark] for mark in self.format.marks if mark in special} - set(sampling.stop_ids)
        self.hidden = frozenset(special.values()) - marks  # tokens that are not in the text of a reply

    def for_template(self, messages: list[Message]) -> list[Message]:
        return without_dropped_reasoning(messages, self.tokenizer.chat_template)

    def read_reply(self, tokenized: TokenizedEpisode, start: int) -> tuple[Message, Any]:
        """Return a reply as a message with its calls, and the calls for the tools."""
        tokens = [token for token in tokenized.tokens[start:] if token not in self.hidden]
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        text = next((text.removesuffix(stop) for stop in self.sampling.stop_texts if text.endswith(stop)), text)
        prompt_end = str(self.tokenizer.decode(tokenized.tokens[max(0, start - PROMPT_END) : start])).rstrip()
        found = parse_message(text, self.format, thinks=self.thinks, in_reasoning=prompt_end.endswith(THINK))
        calls = [
            {"id": f"{len(tokenized.messages):05d}{number:04d}", "name": call.name, "arguments": call.arguments}
            for number, call in enumerate(found.calls)
        ]
        message: Message = {"role": "assistant", "content": found.content}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        if calls:
            functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": function}
                for call, function in zip(calls, functions, strict=True)
            ]
        message = normalised_message(message)
        arguments = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        return message, [call | {"arguments": each} for call, each in zip(calls, arguments, strict=True)]

    def rollout(self, tokenized: TokenizedEpisode) -> Rollout:
        rollout = super().rollout(tokenized)
        failure = tokenized.episode.failure
        rollout.rewards, rollout.failure = {}, f"{TOOLS_FAILED}{failure}" if failure else ""
        return rollout
