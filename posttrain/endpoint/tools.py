"""Tools and response formats of a request: read, checked against limits, and turned into a grammar."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.request_fields import RequestFields

MAX_TOOLS = 128
MAX_SCHEMA_CHARACTERS = 2**16  # of all schemas of a request, as JSON
MAX_SCHEMA_DEPTH = 32
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
ANY_OBJECT = {"type": "object"}


@dataclass(slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and how the model may call them."""

    tools: list[dict[str, Any]]  # as the chat template reads them
    parameters: dict[str, dict[str, Any]]  # name -> JSON schema of the arguments
    choice: str = "auto"  # auto, required, or a tool's name after "="
    strict: bool = False  # arguments must follow their schema also where the model is free to call
    several: bool = True  # more than one call in a message

    def callable_tools(self) -> list[tuple[str, dict[str, Any]]]:
        """Return name and parameters of the tools that may be called."""
        return [
            (name, schema)
            for name, schema in self.parameters.items()
            if not self.choice.startswith("=") or name == self.choice[1:]
        ]


@dataclass(slots=True)
class Output:
    """What the model's message must be: free text, JSON of a schema, calls of tools."""

    tools: ToolUse | None = None
    schema: dict[str, Any] | None = None
    size: int = field(default=0)  # characters of all schemas


def read_output(fields: RequestFields) -> Output:
    """Read `tools`, `tool_choice`, `parallel_tool_calls` and `response_format`."""
    output = Output()
    output.schema = read_response_format(fields.body.get("response_format", {"type": "text"}), output)
    output.tools = read_tools(fields, output)
    return output


def read_tools(fields: RequestFields, output: Output) -> ToolUse | None:
    """Return the tools that the prompt describes to the model; None if there are none or tool_choice is none."""
    given = fields.body.get("tools", [])
    if not isinstance(given, list) or len(given) > MAX_TOOLS:
        raise ApiError(400, f"tools: expected a list of at most {MAX_TOOLS} tools", param="tools")
    parameters: dict[str, dict[str, Any]] = {}
    strict = False
    for place, tool in enumerate(given):
        where = f"tools[{place}]"
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise ApiError(400, f'{where}: expected {{"type": "function", "function": {{...}}}}', param=where)
        name = function.get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name) or name in parameters:
            raise ApiError(
                400, f"{where}.function.name: expected a name of its own, of 1 to 64 of a-z A-Z 0-9 _ . -", param=where
            )
        schema = function.get("parameters")
        parameters[name] = check_schema(
            ANY_OBJECT if schema is None else schema, f"{where}.function.parameters", output
        )
        strict = strict or function.get("strict") is True
    several = "parallel_tool_calls" not in fields.body or fields.flag("parallel_tool_calls")
    choice = read_choice(fields.body.get("tool_choice", "auto" if given else "none"), parameters)
    if not given or choice == "none":
        return None
    return ToolUse(tools=given, parameters=parameters, choice=choice, strict=strict, several=several)


def read_choice(value: Any, tools: dict[str, Any]) -> str:
    """Return none, auto, required, or = and the name of a tool."""
    if value in ("none", "auto"):
        return str(value)
    if value == "required" and tools:
        return "required"
    named = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = named.get("name") if isinstance(named, dict) else None
    if isinstance(name, str) and name in tools:
        return f"={name}"
    names = f"; the tools are {', '.join(tools)}" if tools else "; the request has no tools"
    raise ApiError(
        400,
        f'tool_choice: expected none, auto, required, or {{"type": "function", "function": {{"name": ...}}}}{names}',
        param="tool_choice",
    )


def read_response_format(value: Any, output: Output) -> dict[str, Any] | None:
    """Return the JSON schema of the response; None if it is free text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json_schema":
        inside = value.get("json_schema")
        schema = inside.get("schema") if isinstance(inside, dict) else None
        return check_schema(schema, "response_format.json_schema.schema", output)
    raise ApiError(
        400, "response_format: expected an object with type text, json_object or json_schema", param="response_format"
    )


def check_schema(value: Any, where: str, output: Output) -> dict[str, Any]:
    """Check the limits of a schema; whether it is one is found when its grammar is compiled."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{where}: expected a JSON schema, which is an object", param=where)
    if depth(value) > MAX_SCHEMA_DEPTH:
        raise ApiError(400, f"{where}: nested more than {MAX_SCHEMA_DEPTH} deep", param=where)
    output.size += len(json.dumps(value))
    if output.size > MAX_SCHEMA_CHARACTERS:
        message = f"{where}: the schemas of a request may have {MAX_SCHEMA_CHARACTERS:,} characters together"
        raise ApiError(400, message, param=where)
    return value


def depth(value: Any) -> int:
    """Return how deeply objects and lists are nested; stops above the limit."""
    level, found = [value], 0
    while level and found <= MAX_SCHEMA_DEPTH:
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        found += 1
    return found
