"""The built-in verifiers by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.core.errors import UsageError
from posttrain.rewards.verdict import Completion

Judge = Callable[[Completion], tuple[float, str]]


@dataclass(slots=True, frozen=True)
class Verifier:
    """A judge of completions; what it needs is installed by `pip install 'posttrain[<extra>]'`."""

    name: str
    judge: Judge
    needs: str = ""  # module
    extra: str = ""

    @property
    def summary(self) -> str:
        return (self.judge.__doc__ or "").strip().splitlines()[0]

    def check(self) -> None:
        """UsageError if what it needs is not installed."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise UsageError(f"reward {self.name} needs {self.needs}: pip install 'posttrain[{self.extra}]'")


_VERIFIERS: dict[str, Verifier] = {}
_seconds = 10.0


def allow_seconds(seconds: float) -> None:
    """Set by the process in which verifiers run: after so long it is killed."""
    global _seconds
    _seconds = seconds


def allowed_seconds() -> float:
    """For one completion; who starts processes of its own must end them before."""
    return _seconds


def verifier(name: str, needs: str = "", extra: str = "") -> Callable[[Judge], Judge]:
    """Register a judge under a name."""

    def register(judge: Judge) -> Judge:
        assert name not in _VERIFIERS, name
        _VERIFIERS[name] = Verifier(name, judge, needs, extra)
        return judge

    return register


def verifiers() -> dict[str, Verifier]:
    """All of them; importing their files registers them."""
    from posttrain.rewards import choice, code, countdown, format, math  # noqa: F401

    return dict(sorted(_VERIFIERS.items()))
