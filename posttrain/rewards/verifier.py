"""How a built-in verifier is registered under its name, and the settings that verifiers share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.errors import UsageError
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
        _VERIFIERS[name] = Verifier(name, score, needs, extra, prepare, columns)
        return score

    return register


def registered_verifiers() -> dict[str, Verifier]:
    """Return what has been registered so far, sorted by name; `builtin.verifiers` imports all modules first."""
    return dict(sorted(_VERIFIERS.items()))
