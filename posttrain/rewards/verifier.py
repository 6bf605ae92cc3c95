"""How a built-in verifier is registered under its name, and the settings that verifiers share."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.errors import DataError, UsageError
from posttrain.data.ground_truth import TRUTH_SOURCES, ground_truth_of
from posttrain.rewards.verdict import Completion

ScoreFunction = Callable[[Completion], tuple[float, str]]
"""Returns a value and the reason for it."""


@dataclass(slots=True)
class VerifierSettings:
    """Settings of the process in which verifiers run; it sets them before it loads a verifier."""

    seconds: float = 10.0  # until this process is killed, per completion: a verifier must end its own processes before
    allow_unprotected_code: bool = False  # run programs of the model also where they cannot be isolated


settings = VerifierSettings()


@dataclass(slots=True, frozen=True)
class Verifier:
    """A built-in function that scores completions; `pip install 'posttrain[<extra>]'` installs what it needs."""

    name: str
    score: ScoreFunction
    needs: str = ""  # module
    extra: str = ""
    prepare: Callable[[], None] = lambda: None  # a UsageError says why it cannot work on this machine
    columns: tuple[str, ...] = ()  # of the data; at least one of them must be there

    @property
    def summary(self) -> str:
        return (self.score.__doc__ or "").strip().splitlines()[0]

    def check(self, columns: Sequence[str] = ()) -> None:
        """Raise a UsageError if what it needs is not installed, or is not among the data's columns, if given."""
        if columns and self.columns and not set(columns) & set(self.columns):
            raise UsageError(
                f"reward {self.name} compares completions with a ground truth, and the data has none: expected one of "
                f"the columns {', '.join(self.columns)}, found {', '.join(columns)}. Rename a column with "
                f'data.map_keys, for example {{"{self.columns[0]}": "COLUMN"}}'
            )
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise UsageError(f"reward {self.name} needs {self.needs}: pip install 'posttrain[{self.extra}]'")

    def check_example(self, columns: Mapping[str, Any], origin: str) -> None:
        """Raise a DataError if none of the columns that it compares with has a value in this example."""
        if self.columns and not any(_has_value(columns.get(name)) for name in self.columns):
            there = ", ".join(name for name in self.columns if name in columns)
            empty = f"the ground truth in {there} is empty" if there else "the example has no ground truth"
            raise DataError(
                f"{origin}: {empty}, and reward {self.name} compares completions with it: remove the example, or name "
                f'another column with data.map_keys, for example {{"{self.columns[0]}": "COLUMN"}}'
            )


def _has_value(value: Any) -> bool:
    """Whether a cell is not null, blank, NaN or empty; of verl's reward_model the ground truth in it counts."""
    if isinstance(value, dict) and "ground_truth" in value:
        value = value["ground_truth"]
    if isinstance(value, str):
        return bool(value.strip())
    return value is not None and value == value and value not in ([], {})


def _any_truth(score: ScoreFunction) -> ScoreFunction:
    """Return the function with the best value for any of several ground truths, if these are a list."""

    @functools.wraps(score)
    def best(completion: Completion) -> tuple[float, str]:
        truths = ground_truth_of(completion.columns)
        if not isinstance(truths, list):
            return score(completion)
        found: list[tuple[float, str]] = []
        unusable: Exception = LookupError("the ground truth is an empty list")
        for truth in truths:
            try:
                found.append(score(replace(completion, columns={**completion.columns, "ground_truth": truth})))
            except (ValueError, LookupError) as error:  # one that this verifier cannot read, a word for instance
                unusable = error
        if not found:
            raise unusable
        return max(found, key=lambda verdict: verdict[0])

    return best


_VERIFIERS: dict[str, Verifier] = {}


def verifier(
    name: str,
    needs: str = "",
    extra: str = "",
    prepare: Callable[[], None] = lambda: None,
    columns: tuple[str, ...] = (),
) -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as the verifier of this name."""

    def register(score: ScoreFunction) -> ScoreFunction:
        assert name not in _VERIFIERS, name
        compares = _any_truth(score) if columns == TRUTH_SOURCES else score
        _VERIFIERS[name] = Verifier(name, compares, needs, extra, prepare, columns)
        return score

    return register


def registered_verifiers() -> dict[str, Verifier]:
    """Return what has been registered so far, sorted by name; `builtin.verifiers` imports all modules first."""
    return dict(sorted(_VERIFIERS.items()))
