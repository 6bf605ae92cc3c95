"""What `--reward` names: a verifier, a function, a service, a judge, or a reward model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from posttrain.core.errors import UsageError
from posttrain.rewards.builtin import verifiers
from posttrain.rewards.rubric import Rubric, read_rubric
from posttrain.sandbox.callables import PackedFunction, file_of, pack_function
from posttrain.sandbox.user_code import did_you_mean, parse_location

COMBINE = "combine:"
JUDGE = "judge:"
IN_MEMORY = "in-memory:"  # a function of this process that no file contains

RewardLike = str | Callable[..., Any]

_packed: dict[str, PackedFunction] = {}  # functions of this process that were given as rewards, by name


@dataclass(slots=True, frozen=True, kw_only=True)
class RewardSpec:
    """One reward as the user named it."""

    text: str
    kind: Literal["verifier", "function", "remote", "judge", "model"]
    name: str  # for metrics
    place: str  # name of a verifier, file of a judge, absolute file or module of a function, address, path of a model
    function: str = ""
    packed: PackedFunction | None = None  # of a function that no file contains
    rubric: Rubric | None = None  # of a judge
    combines: bool = False  # is called last, with the values of all other rewards, and replaces their sum


def reward_texts(rewards: Sequence[RewardLike]) -> list[str]:
    """Name each reward as text, as configurations hold it: FILE.py:NAME for a function of a module.

    Any other function (of a notebook cell or a script, a lambda, a closure) is kept for the life of this process under
    `in-memory:NAME`, and sent to the processes that score with it.
    """
    texts: list[str] = []
    for reward in rewards:
        text = reward if isinstance(reward, str) else file_of(reward)
        if text is None:
            assert callable(reward)
            packed = pack_function(reward)
            name, number = packed.name, 2
            while f"{IN_MEMORY}{name}" in texts:
                name, number = f"{packed.name}_{number}", number + 1
            _packed[name] = packed
            text = f"{IN_MEMORY}{name}"
        texts.append(text)
    return texts


def parse_specs(texts: Sequence[str]) -> list[RewardSpec]:
    """Parse all rewards and give them different names; a UsageError says which one is wrong."""
    specs: list[RewardSpec] = []
    for text in texts:
        spec = parse_spec(text)
        taken = {other.name for other in specs}
        name, number = spec.name, 2
        while name in taken:
            name, number = f"{spec.name}_{number}", number + 1
        specs.append(replace(spec, name=name))
    for spec in specs[:-1]:
        if spec.combines:
            raise UsageError(f"reward {spec.text!r}: only the last reward may combine the others; move it to the end")
    return specs


def parse_spec(text: str) -> RewardSpec:
    """Parse one reward; a UsageError says that there is no such verifier or file."""
    if text.startswith(("http://", "https://")):
        return _service(text)
    if text.startswith(COMBINE):
        spec = parse_spec(text.removeprefix(COMBINE))
        if spec.kind != "function":
            raise UsageError(f"reward {text!r}: expected a function after {COMBINE}, as in {COMBINE}file.py:function")
        return replace(spec, text=text, combines=True)
    if text.startswith(IN_MEMORY):
        return _in_memory(text)
    if text.startswith("model:"):
        path = text.removeprefix("model:")
        if not path:
            raise UsageError(f"reward {text!r}: give the reward model's directory, as in model:runs/reward")
        return RewardSpec(text=text, kind="model", name=f"model.{Path(path).name}", place=path)
    if text.startswith(JUDGE):
        return _judge(text)
    if ":" in text or text.endswith(".py"):
        return _function(text)
    known = verifiers()
    if text not in known:
        raise UsageError(
            f"there is no reward {text!r}.{did_you_mean(text, list(known))} The verifiers are {', '.join(known)}; "
            "or give file.py:function, package.module:function, http://host:port/path, judge:RUBRIC.yaml or "
            "model:DIRECTORY."
        )
    return RewardSpec(text=text, kind="verifier", name=text, place=text)


def _in_memory(text: str) -> RewardSpec:
    name = text.removeprefix(IN_MEMORY)
    if name not in _packed:
        raise UsageError(
            f"reward {text!r} was a Python function of the process that started the run. Resume from Python and pass "
            "the function again, or put it into a file and give file.py:function"
        )
    return RewardSpec(text=text, kind="function", name=name, place="", function=name, packed=_packed[name])


def _judge(text: str) -> RewardSpec:
    file = Path(text.removeprefix(JUDGE))
    if not file.is_file():
        raise UsageError(f"reward {text!r}: there is no file {file}; give a rubric, as in {JUDGE}rubric.yaml")
    return RewardSpec(
        text=text, kind="judge", name=f"judge.{file.stem}", place=str(file.absolute()), rubric=read_rubric(file)
    )


def _service(text: str) -> RewardSpec:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # a bad port raises
    except ValueError as error:
        raise UsageError(f"reward {text!r} is not an address: {error}") from error
    if not host:
        raise UsageError(f"reward {text!r}: the address has no host")
    name = re.sub(r"\W+", "_", host + parts.path).strip("_")
    return RewardSpec(text=text, kind="remote", name=name, place=text)


def _function(text: str) -> RewardSpec:
    location = parse_location(text, f"reward {text!r}", "function")
    place, function = location.place, location.name
    module = Path(place).stem if place.endswith(".py") else place.split(".")[-1]
    return RewardSpec(text=text, kind="function", name=f"{module}.{function}", place=place, function=function)
