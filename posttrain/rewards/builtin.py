"""The built-in verifiers by name: importing their modules registers them."""

from __future__ import annotations

from posttrain.rewards import choice, code, countdown, format, math  # noqa: F401
from posttrain.rewards.verifier import Verifier, registered_verifiers


def verifiers() -> dict[str, Verifier]:
    """Return all built-in verifiers, sorted by name."""
    return registered_verifiers()
