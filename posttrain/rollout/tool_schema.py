"""Python functions as tools: a JSON schema from type hints and docstring, and a check of the arguments of a call.

def add(a: int, b: int = 0) -> int:
    '''Adds two numbers.

    Args:
        a: the first number
    '''
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union

from posttrain.core.errors import UsageError

Schema = dict[str, Any]
NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
ARGUMENTS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.MULTILINE)
ARGUMENT = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.+)$", re.MULTILINE)


def describe_function(function: Callable[..., Any]) -> Schema:
    """Return a function as chat templates read tools; UsageError if hints or docstring are missing."""
    name = function.__name__
    text = inspect.getdoc(function)
    if not text:
        raise UsageError(f"{name} has no docstring: the model is told what the tool does by it")
    head, _, rest = text.partition(found[0]) if (found := ARGUMENTS.search(text)) else (text, "", "")
    explained = dict(ARGUMENT.findall(rest))
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise UsageError(f"{name}: a type hint is not defined: {error}") from None
    properties: dict[str, Schema] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UsageError(
                f"{name}: the parameter {parameter.name} has no name in a call: give each a name of its own"
            )
        if parameter.name not in hints:
            raise UsageError(
                f"{name}: the parameter {parameter.name} has no type hint, which its JSON schema is made from"
            )
        schema = schema_of(hints[parameter.name], f"{name}: the parameter {parameter.name}")
        if parameter.name in explained:
            schema = schema | {"description": explained[parameter.name].strip()}
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    function_schema = {"name": name, "description": " ".join(head.split()), "parameters": parameters}
    return {"type": "function", "function": function_schema}


def schema_of(hint: Any, where: str) -> Schema:
    """Return the JSON schema of a type hint."""
    if hint is Any:
        return {}
    if hint is type(None):
        return {"type": "null"}
    if hint in NAMES:
        return {"type": NAMES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": schema_of(arguments[0], where)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": schema_of(arguments[1], where)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each, where) for each in arguments]}
    raise UsageError(
        f"{where} has the type {hint}; tools take str, int, float, bool, list, dict, Literal, None and unions of them"
    )


def problem_with(arguments: Any, schema: Schema, where: str = "the arguments") -> str:
    """Say what is wrong with arguments that a model wrote, by the parts of JSON schema that hints become."""
    if "anyOf" in schema:
        problems = [problem_with(arguments, each, where) for each in schema["anyOf"]]
        return "" if not all(problems) else problems[0]
    if "enum" in schema and not any(arguments == each and type(arguments) is type(each) for each in schema["enum"]):
        return f"{where}: expected one of {', '.join(map(repr, schema['enum']))}"
    kind: Any = schema.get("type")
    kinds: list[Any] = kind if isinstance(kind, list) else [kind]  # servers write ["string", "null"], too
    if all(each in TYPES for each in kinds) and not any(has_kind(arguments, each) for each in kinds):
        return f"{where}: expected {' or '.join(kinds)}, not {type(arguments).__name__}"
    if isinstance(arguments, list) and isinstance(schema.get("items"), dict):
        found = (problem_with(each, schema["items"], f"{where}[{place}]") for place, each in enumerate(arguments))
        return next(filter(None, found), "")
    if isinstance(arguments, dict):
        return problem_with_object(arguments, schema, where)
    return ""


def has_kind(value: Any, kind: str) -> bool:
    """Whether a value has a type of JSON schema, where True is no number."""
    return isinstance(value, TYPES[kind]) and not (isinstance(value, bool) and kind in ("integer", "number"))


def problem_with_object(arguments: dict[str, Any], schema: Schema, where: str) -> str:
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        return f"{where}: {missing[0]} is missing"
    other = schema.get("additionalProperties", not properties)
    for name, value in arguments.items():
        known = properties.get(name, other)
        if known is False:
            return f"{where}: there is no {name}; there is {', '.join(properties)}"
        if isinstance(known, dict) and (problem := problem_with(value, known, name)):
            return problem
    return ""
