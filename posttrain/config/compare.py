"""Compares the settings of a run with those that it was started with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as section.option -> value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def option_defaults(config: Any) -> dict[str, Any]:
    """Return section.option -> default of a configuration, a dataclass whose sections are dataclasses."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": default for name, default in option_defaults(value).items()}
        elif field.default is not dataclasses.MISSING:
            found[field.name] = list(field.default) if isinstance(field.default, tuple) else field.default
    return found


def changed_options(before: dict[str, Any], now: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Describe the settings that differ, by name.

    One that is missing in `before`, as the option is newer than what was saved, has its default. Empty ones are equal.
    """
    changed = {}
    for name, value in now.items():
        earlier = before.get(name, defaults.get(name))
        if earlier != value and (earlier or value):
            changed[name] = f"{name} was {earlier!r}, is {value!r}"
    return changed
