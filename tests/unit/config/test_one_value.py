"""Every option of every verb holds one value of one type."""

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.cli.tools import args_of
from posttrain.config.parsing import option_keys
from posttrain.config.sections import option_value, with_algorithm
from posttrain.config.verbs import TOOLS
from posttrain.pipelines.settings import RECIPES, pipeline_defaults

MAPPINGS = {"map_keys", "vllm_options", "tags"}
"""Options that are mappings: names of columns, of an engine's options and of a data format's tags."""


def starts():
    yield from ((verb, with_algorithm(algorithm)) for verb, algorithm in ALGORITHMS.items())
    yield from ((verb, pipeline_defaults(verb)) for verb in RECIPES)
    yield from ((verb, args()) for verb in TOOLS for args in args_of(verb))


def types(start):
    """Option -> its type."""
    for key in option_keys(start):
        section, _, name = key.rpartition(".")
        holder = option_value(start, section) if section else start
        yield key, get_type_hints(type(holder))[name]


def is_one_value(kind):
    """Whether a type is that of one value: text, a number, a switch or a choice, or nothing instead."""
    if get_origin(kind) in (UnionType, Union):
        parts = [part for part in get_args(kind) if part is not NoneType]
        return len(parts) == 1 and is_one_value(parts[0])
    if get_origin(kind) is Literal:
        return len({type(choice) for choice in get_args(kind)}) == 1
    return kind in (str, int, float, bool)


def is_allowed(name, kind):
    if get_origin(kind) is tuple:
        return len(get_args(kind)) == 2 and get_args(kind)[1] is ... and is_one_value(get_args(kind)[0])
    if get_origin(kind) is dict:
        return name in MAPPINGS
    return is_one_value(kind)


@pytest.mark.parametrize(
    ("verb", "start"), [pytest.param(*found, id=f"{found[0]}-{i}") for i, found in enumerate(starts())]
)
def test_an_option_holds_one_value_of_one_type(verb, start):
    wrong = {key: kind for key, kind in types(start) if not is_allowed(key.rpartition(".")[2], kind)}
    assert not wrong, f"posttrain {verb}: {wrong}"


@pytest.mark.parametrize(
    "kind",
    [tuple[float, int], tuple[float, float], tuple[str], str | float, dict[str, str], Any, list[str], Literal["a", 0]],
)
def test_other_types_are_found(kind):
    assert not is_allowed("kl_target", kind)
