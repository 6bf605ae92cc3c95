"""Comparison with recorded numbers: bit for bit where the machine computes alike, else within a tolerance."""

import math

TOLERANCE = 1e-4  # relative; of metrics, where the bits of this machine are others
TINY = 1e-5  # below it a metric is rounding error, such as the loss of a policy gradient at equal weights
HALF_PRECISION = {"sft-bfloat16": 2e-2, "sft-float16": 2e-2}  # case -> its tolerance


def differences(recorded, current, tolerance, where=""):
    """What differs, as lines of text. New keys are no difference; a tolerance of 0 means equal bits.

    With a tolerance only metrics are compared, and of all other lists how many entries they have: one token that is
    sampled otherwise changes everything behind it.
    """
    if isinstance(recorded, dict):
        if not isinstance(current, dict):
            return [f"{where}: {recorded!r} became {current!r}"]
        missing = [f"{where}/{key}: is missing" for key in recorded if key not in current]
        shared = [key for key in recorded if key in current]
        return missing + [
            line for key in shared for line in differences(recorded[key], current[key], tolerance, f"{where}/{key}")
        ]
    if isinstance(recorded, list):
        if not isinstance(current, list) or len(recorded) != len(current):
            return [f"{where}: {recorded!r} became {current!r}"]
        if tolerance and not where.endswith("/metrics"):
            return []
        pairs = enumerate(zip(recorded, current, strict=True))
        return [line for at, pair in pairs for line in differences(*pair, tolerance, f"{where}/{at}")]
    if same(recorded, current, tolerance, compared="/metrics/" in where):
        return []
    return [f"{where}: {recorded!r} became {current!r}"]


def same(recorded, current, tolerance, compared):
    if not tolerance:
        return recorded == current or (recorded != recorded and current != current)
    if not compared or recorded == current:
        return True
    numbers = isinstance(recorded, int | float) and isinstance(current, int | float)
    return numbers and (
        math.isclose(recorded, current, rel_tol=tolerance, abs_tol=TINY)
        or (recorded != recorded and current != current)
    )
