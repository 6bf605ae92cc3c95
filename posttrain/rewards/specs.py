"""What `--reward` names: a verifier, a function in a file or module, a service, or a reward model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from posttrain.core.errors import UsageError
from posttrain.rewards.verifier import verifiers

COMBINE = "combine:"
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(slots=True, frozen=True, kw_only=True)
class Spec:
    """One reward as the user named it."""

    text: str
    kind: Literal["verifier", "function", "remote", "model"]
    name: str  # for metrics
    place: str  # verifier, absolute file or module, address, model
    function: str = ""
    combines: bool = False  # is asked last, with what the others said, and has the last word


def parse_specs(texts: Sequence[str]) -> list[Spec]:
    """All of them, with names that differ; UsageError for what cannot be."""
    specs: list[Spec] = []
    for text in texts:
        spec = parse_spec(text)
        taken = {other.name for other in specs}
        name, number = spec.name, 2
        while name in taken:
            name, number = f"{spec.name}_{number}", number + 1
        specs.append(replace(spec, name=name))
    for spec in specs[:-1]:
        if spec.combines:
            raise UsageError(f"reward {spec.text!r}: what combines the others comes last, and there is one of it")
    return specs


def parse_spec(text: str) -> Spec:
    """UsageError if there is no such verifier or file."""
    if text.startswith(("http://", "https://")):
        return _service(text)
    if text.startswith(COMBINE):
        spec = parse_spec(text.removeprefix(COMBINE))
        if spec.kind != "function":
            raise UsageError(f"reward {text!r}: after {COMBINE} comes a function: {COMBINE}file.py:function")
        return replace(spec, text=text, combines=True)
    if text.startswith("model:"):
        path = text.removeprefix("model:")
        if not path:
            raise UsageError(f"reward {text!r}: name the reward model's folder or run: model:runs/reward")
        return Spec(text=text, kind="model", name=f"model.{Path(path).name}", place=path)
    if ":" in text or text.endswith(".py"):
        return _function(text)
    known = verifiers()
    if text not in known:
        raise UsageError(f"there is no reward {text!r}.{_near(text, list(known))} {_what_there_is(list(known))}")
    return Spec(text=text, kind="verifier", name=text, place=text)


def _service(text: str) -> Spec:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port  # a bad port raises
    except ValueError as error:
        raise UsageError(f"reward {text!r}: not an address: {error}") from error
    if not host:
        raise UsageError(f"reward {text!r}: the address names no host")
    name = re.sub(r"\W+", "_", host + parts.path).strip("_")
    return Spec(text=text, kind="remote", name=name, place=text)


def _function(text: str) -> Spec:
    place, _, function = text.rpartition(":")
    if not place:
        raise UsageError(f"reward {text!r}: name the function, too: {text.rstrip(':')}:score")
    if not function.isidentifier():
        raise UsageError(f"reward {text!r}: {function!r} is not the name of a function; write file.py:function")
    if place.endswith(".py"):
        file = Path(place).absolute()
        if not file.is_file():
            folder = file.parent
            beside = [other.name for other in folder.glob("*.py")] if folder.is_dir() else []
            raise UsageError(f"reward {text!r}: there is no file {place}.{_near(file.name, beside)}")
        return Spec(text=text, kind="function", name=f"{file.stem}.{function}", place=str(file), function=function)
    if not MODULE.fullmatch(place):
        raise UsageError(f"reward {text!r}: {place!r} is neither a file that ends in .py nor a module")
    return Spec(text=text, kind="function", name=f"{place.split('.')[-1]}.{function}", place=place, function=function)


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _what_there_is(known: list[str]) -> str:
    return (
        f"There are {', '.join(known)}; or give file.py:function, package.module:function, "
        "http://host:port/path or model:FOLDER."
    )
