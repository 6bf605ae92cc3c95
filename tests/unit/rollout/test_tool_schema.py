"""Functions as tools: a schema from hints and docstring; arguments that a model wrote are checked against it."""

from typing import Any, Literal

import pytest

from posttrain.core.errors import UsageError
from posttrain.rollout.tool_schema import describe_function, problem_with


def search(
    query: str, limit: int = 3, kinds: list[Literal["page", "file"]] | None = None, *, exact: bool = False
) -> Any:
    """Search the index,
    best first.

    Args:
        query: words to look for
        limit (int): most results

    Returns:
        texts
    """


def test_the_schema_is_that_of_hints_and_docstring():
    found = describe_function(search)
    assert found["type"] == "function" and found["function"]["name"] == "search"
    assert found["function"]["description"] == "Search the index, best first."
    assert found["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "words to look for"},
            "limit": {"type": "integer", "description": "most results"},
            "kinds": {"anyOf": [{"type": "array", "items": {"enum": ["page", "file"]}}, {"type": "null"}]},
            "exact": {"type": "boolean"},
        },
        "required": ["query"],
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "a"}, ""),
        ({"query": "a", "limit": 2, "kinds": ["page"], "exact": True}, ""),
        ({"query": "a", "kinds": None}, ""),
        ({}, "the arguments: query is missing"),
        ({"query": 3}, "query: expected string, not int"),
        ({"query": "a", "limit": "2"}, "limit: expected integer, not str"),
        ({"query": "a", "limit": True}, "limit: expected integer, not bool"),
        ({"query": "a", "limit": 2.5}, "limit: expected integer, not float"),
        ({"query": "a", "kinds": ["site"]}, "kinds[0]: expected one of 'page', 'file'"),
        ({"query": "a", "pages": 1}, "the arguments: there is no pages; there is query, limit, kinds, exact"),
        ([], "the arguments: expected object, not list"),
    ],
)
def test_wrong_arguments_are_named(arguments, problem):
    assert problem_with(arguments, describe_function(search)["function"]["parameters"]) == problem


def test_what_cannot_be_described_is_refused():
    def silent(a: int): ...

    def untyped(a):
        """Do it."""

    def many(*a: int):
        """Do it."""

    def odd(a: set[int]):
        """Do it."""

    for function, complaint in (
        (silent, "no docstring"),
        (untyped, "parameter a has no type hint"),
        (many, "no name in a call"),
        (odd, r"has the type set\[int\]"),
    ):
        with pytest.raises(UsageError, match=complaint):
            describe_function(function)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"place": "x"}, ""),
        ({"place": None}, ""),
        ({"place": 3}, "place: expected string or null, not int"),
        ({"count": True}, "count: expected integer or number, not bool"),
        ({"other": 3}, ""),
    ],
)
def test_a_server_may_give_a_list_of_types(arguments, problem):
    properties = {
        "place": {"type": ["string", "null"]},
        "count": {"type": ["integer", "number"]},
        "other": {"type": ["x", "null"]},
    }
    assert problem_with(arguments, {"type": "object", "properties": properties}) == problem
