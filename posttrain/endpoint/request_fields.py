"""The body of a request as JSON, and its fields, each checked when it is read."""

from __future__ import annotations

import json
import math
from typing import Any

from posttrain.core.files import refuse_constant
from posttrain.endpoint.errors import ApiError

WITHOUT_EFFECT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# Fields that are accepted only with a value that changes nothing, since they are not implemented.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "best_of": (1,),
    "suffix": ("",),
}


def parse_body(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object")
    return found


class RequestFields:
    """The fields of a body, each read once and checked; null is the same as left out."""

    def __init__(self, body: dict[str, Any], known: set[str]) -> None:
        self.body = {name: value for name, value in body.items() if value is not None}
        for name in [name for name in self.body if name in NEUTRAL and name not in known]:
            value = self.body.pop(name)
            if not any(value == accepted for accepted in NEUTRAL[name]):
                raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
        if unknown := set(self.body) - known - WITHOUT_EFFECT:
            name = min(unknown)
            message = f"unknown field {name!r}; the fields are {', '.join(sorted(known))}"
            raise ApiError(400, message, param=name, code="unknown_parameter")

    def number(self, name: str, default: float, low: float, high: float = math.inf) -> float:
        value = self.body.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
            or value == math.inf
        ):
            raise wrong_field(name, value, f"a number {range_text(low, high)}")
        return float(value)

    def integer(self, name: str, default: int, low: float, high: float = math.inf) -> int:
        value = self.body.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong_field(name, value, f"a whole number {range_text(low, high)}")
        return value

    def flag(self, name: str) -> bool:
        value = self.body.get(name, False)
        if not isinstance(value, bool):
            raise wrong_field(name, value, "true or false")
        return value


def wrong_field(name: str, value: Any, expected: str) -> ApiError:
    shown = json.dumps(value)
    return ApiError(
        400, f"{name} is {shown if len(shown) <= 60 else shown[:60] + '...'}; expected {expected}", param=name
    )


def range_text(low: float, high: float) -> str:
    if high == math.inf:
        return f"of at least {low:g}" if low > -math.inf else "within 64 bits"
    return f"from {low:g} to {high:g}"
