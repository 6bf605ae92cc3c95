"""Calls reward functions that were written for other libraries: the names of the parameters show which form it is."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.data.ground_truth import TRUTH_COLUMNS, ground_truth_of
from posttrain.rewards.verdict import Completion

FORMS = """\
  score(text, ground_truth=None, **columns)                         any of text, prompt, messages, finish, tokens,
                                                                    columns, and names of columns of the data
  f(prompts, completions, **columns) -> list                        TRL, MindRLHF
  compute_score(data_source, solution_str, ground_truth, extra_info=None)   verl
  compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list   verl, in batches
  reward_func(queries, prompts, labels) -> list                     OpenRLHF
  f(completion, answer, **kwargs), f(prompt, completion, state ...) verifiers"""
OWN_FIELDS = tuple(field.name for field in fields(Completion))
LARGEST_REWARD = 1e15  # the square of a larger one exceeds what float32 holds, in which advantages are computed
SCORE_KEYS = ("score", "reward", "rewards", "scores", "value")


class ScalarForBatchError(TypeError):
    """A function of batches returned one number: which completion it belongs to is not known."""


Arguments = Callable[[Completion], dict[str, Any]]


@dataclass(slots=True, frozen=True)
class FunctionForm:
    """A calling convention: `arguments` lists what a function of this form may take, for one completion."""

    name: str
    mark: str  # the parameter by which the form is recognised
    batch: bool  # arguments and result are lists with one element per completion
    arguments: Arguments


@dataclass(slots=True, frozen=True)
class AdaptedFunction:
    """A user's function that can be called with completions."""

    form: FunctionForm
    function: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]

    def missing(self, columns: Sequence[str]) -> list[str]:
        """List the parameters for which an example with these columns has no value."""
        values = dict.fromkeys(columns, "")
        completion = Completion(prompt="", messages=[], text="", finish="", tokens=0, columns=values)
        return [p.name for p in self.parameters if _required(p) and p.name not in self.form.arguments(completion)]

    def call(self, completions: Sequence[Completion]) -> Any:
        """Call the function; one that takes a single completion gets the first."""
        each = [self.form.arguments(completion) for completion in completions]
        if self.form.batch:
            names = dict.fromkeys(name for arguments in each for name in arguments)
            available: dict[str, Any] = {name: [arguments.get(name) for arguments in each] for name in names}
        else:
            available = each[0]
        result = self.function(*self._positional(available), **self._named(available))
        return asyncio.run(_await(result)) if inspect.isawaitable(result) else result

    def _positional(self, available: dict[str, Any]) -> list[Any]:
        only = [p for p in self.parameters if p.kind is p.POSITIONAL_ONLY]
        return [_take(p, available) for p in only if _required(p) or p.name in available]

    def _named(self, available: dict[str, Any]) -> dict[str, Any]:
        plain = [p for p in self.parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        named = {p.name: _take(p, available) for p in plain if _required(p) or p.name in available}
        if any(p.kind is p.VAR_KEYWORD for p in self.parameters):
            taken = {p.name for p in self.parameters if p.kind is p.POSITIONAL_ONLY}
            named |= {name: value for name, value in available.items() if name not in named and name not in taken}
        return named


async def _await(result: Any) -> Any:
    return await result


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _take(parameter: inspect.Parameter, available: dict[str, Any]) -> Any:
    if parameter.name not in available:
        raise LookupError(f"the function needs {parameter.name!r}; available are {', '.join(available)}")
    return available[parameter.name]


def adapt(function: Any, name: str) -> AdaptedFunction:
    """Recognise the form of a function by its parameters; a UsageError if it has none of the known forms."""
    if not callable(function) or inspect.isclass(function):
        raise UsageError(f"{name} is a {type(function).__name__}, not a function")
    try:
        parameters = tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: cannot read its parameters: {error}") from error
    names = {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for form in FOREIGN:
        if form.mark in names:
            return AdaptedFunction(form, function, parameters)
    if names & {*OWN_FIELDS, "rewards"}:  # "rewards" is a parameter of combining functions
        return AdaptedFunction(OWN, function, parameters)
    shown = inspect.signature(function)
    raise UsageError(f"{name}{shown} has none of the known forms of a reward function:\n{FORMS}")


# The arguments that each form may take


def _all_columns(completion: Completion) -> dict[str, Any]:
    """Return the columns of the example; the ground truth also under its other usual names."""
    label = ground_truth_of(completion.columns)
    known = {} if label is None else dict.fromkeys(TRUTH_COLUMNS, label)
    return known | {str(name): value for name, value in completion.columns.items()}


def _is_conversation(completion: Completion) -> bool:
    """Whether the example has messages instead of a text: other libraries then pass messages to rewards, too."""
    return isinstance(completion.columns.get("prompt"), list) or "messages" in completion.columns


def _prompt(completion: Completion) -> Any:
    if _is_conversation(completion):
        return completion.messages
    text = completion.columns.get("prompt")
    return text if isinstance(text, str) else completion.prompt


def _completion(completion: Completion) -> Any:
    return [{"role": "assistant", "content": completion.text}] if _is_conversation(completion) else completion.text


def _own(completion: Completion) -> dict[str, Any]:
    return _all_columns(completion) | {name: getattr(completion, name) for name in OWN_FIELDS}


def _trl(completion: Completion) -> dict[str, Any]:
    columns = {name: value for name, value in _all_columns(completion).items() if name not in ("prompt", "completion")}
    return columns | {"prompts": _prompt(completion), "completions": _completion(completion)}


def _verl(completion: Completion) -> dict[str, Any]:
    columns = completion.columns
    return _all_columns(completion) | {
        "data_source": columns.get("data_source", ""),
        "solution_str": completion.text,
        "ground_truth": ground_truth_of(columns),
        "extra_info": columns.get("extra_info") or {},
    }


def _verl_batch(completion: Completion) -> dict[str, Any]:
    one = _verl(completion)
    plural = {f"{name}s": one[name] for name in ("data_source", "solution_str", "ground_truth", "extra_info")}
    return _all_columns(completion) | plural


def _openrlhf(completion: Completion) -> dict[str, Any]:
    query = completion.prompt + completion.text
    label = ground_truth_of(completion.columns)
    return _all_columns(completion) | {"queries": query, "prompts": completion.prompt, "labels": label}


def _verifiers(completion: Completion) -> dict[str, Any]:
    columns = _all_columns(completion)
    shown = {
        "prompt": _prompt(completion),
        "completion": _completion(completion),
        "answer": columns.get("answer", ""),
        "task": columns.get("task", "default"),
        "info": columns.get("info", {}),
    }
    return columns | shown | {"state": dict(shown)}


OWN = FunctionForm("posttrain", "", False, _own)
FOREIGN = (
    FunctionForm("TRL", "completions", True, _trl),
    FunctionForm("verl", "solution_str", False, _verl),
    FunctionForm("verl, in batches", "solution_strs", True, _verl_batch),
    FunctionForm("OpenRLHF", "queries", True, _openrlhf),
    FunctionForm("verifiers", "completion", False, _verifiers),
)


# What functions may return


def finite_reward(value: Any) -> float:
    """Convert what a function returned, a number or a numpy or torch scalar, to a finite float."""
    if not isinstance(value, bool | int | float) and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise TypeError(f"the reward function returned a {type(value).__name__}, not a number")
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"the reward function returned {value}")
    if abs(value) > LARGEST_REWARD:
        raise ValueError(f"the reward function returned {value:g}; rewards must be at most {LARGEST_REWARD:g} in size")
    return value


def one_result(result: Any) -> tuple[float | None, str]:
    """Read value and reason from a number, (number, reason), or a dictionary with the key `score` or `reward`.

    None in the place of the number: the function does not apply to this completion.
    """
    result = _unpack(result)
    reason = ""
    if isinstance(result, tuple) and len(result) == 2:
        result, reason = result[0], str(result[1])
    if isinstance(result, list) and len(result) == 1:
        result = result[0]
    return None if result is None else finite_reward(result), reason


def many_results(result: Any, expected: int) -> list[Any]:
    """Read one element per completion from a list, an array, a tensor, or a dictionary with `rewards`."""
    result = _unpack(result)
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], list):  # MindRLHF: (rewards, answers)
        result = list(zip(result[0], result[1], strict=True))
    if not isinstance(result, list | tuple) and hasattr(result, "tolist"):
        result = result.tolist()
    if isinstance(result, int | float):
        if expected == 1:
            return [result]
        raise ScalarForBatchError(
            f"the reward function takes lists, but it returned one number for {expected} completions. Return a list "
            "with one number for each completion, or take a single one: score(text, ground_truth=None, **columns)"
        )
    if not isinstance(result, list | tuple):
        raise TypeError(f"the reward function returned a {type(result).__name__}, not a list")
    if len(result) != expected:
        raise ValueError(f"the reward function returned {len(result)} rewards for {expected} completions")
    return list(result)


def _unpack(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    for key in SCORE_KEYS:
        if key in result:
            return result[key]
    raise ValueError(f"the reward function returned a dictionary without any of {', '.join(SCORE_KEYS)}")
