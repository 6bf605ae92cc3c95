"""How a built-in verifier is registered under its name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.core.errors import UsageError
from posttrain.rewards.verdict import Completion

ScoreFunction = Callable[[Completion], tuple[float, str]]
"""Returns a value and the reason for it."""


@dataclass(slots=True, frozen=True)
class Verifier:
    """A built-in function that scores completions; `pip install 'posttrain[<extra>]'` installs what it needs."""

    name: str
    score: ScoreFunction
    needs: str = ""  # module
    extra: str = ""

    @property
    def summary(self) -> str:
        return (self.score.__doc__ or "").strip().splitlines()[0]

    def check(self) -> None:
        """Raise a UsageError if what it needs is not installed."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise UsageError(f"reward {self.name} needs {self.needs}: pip install 'posttrain[{self.extra}]'")


_VERIFIERS: dict[str, Verifier] = {}
_seconds = 10.0


def set_time_limit(seconds: float) -> None:
    """Set how long a verifier may take for one completion; the process in which verifiers run calls this."""
    global _seconds
    _seconds = seconds


def time_limit() -> float:
    """Seconds until this process is killed; a verifier that starts processes must end them before."""
    return _seconds


def verifier(name: str, needs: str = "", extra: str = "") -> Callable[[ScoreFunction], ScoreFunction]:
    """Register a function as the verifier of this name."""

    def register(score: ScoreFunction) -> ScoreFunction:
        assert name not in _VERIFIERS, name
        _VERIFIERS[name] = Verifier(name, score, needs, extra)
        return score

    return register


def registered() -> dict[str, Verifier]:
    """Return what has been registered so far, sorted by name; `builtin.verifiers` imports all modules first."""
    return dict(sorted(_VERIFIERS.items()))
