"""Compares with recorded numbers: bit for bit where the machine computes the same bits, else within a tolerance."""

import math

TOLERANCE = 1e-4  # relative, for metrics on a machine that computes other bits
TINY = 1e-5  # absolute: a smaller metric is rounding error, such as a policy-gradient loss at equal weights
REDEFINED = {"rewards/overlong"}  # metrics that are computed in another way on purpose: see CHANGELOG.md
ONLY_AT_EQUAL_WEIGHTS = {"sampler_kl"}  # metrics that batches which were generated ahead no longer have
HALF_PRECISION = {"sft-bfloat16": 2e-2, "sft-float16": 2e-2}  # tolerance by case


def differences(recorded, current, tolerance, where=""):
    """Lists the differences as text. Additional keys are allowed; a tolerance of 0 compares bits.

    With a tolerance only metrics and the lengths of all other lists are compared: one token that is sampled differently
    changes everything after it.
    """
    if isinstance(recorded, dict):
        if not isinstance(current, dict):
            return [f"{where}: {recorded!r} became {current!r}"]
        missing = [f"{where}/{key}: is missing" for key in recorded if key not in {*current, *ONLY_AT_EQUAL_WEIGHTS}]
        shared = [key for key in recorded if key in current and key not in REDEFINED]
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
