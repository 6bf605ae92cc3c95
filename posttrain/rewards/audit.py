r"""Compares verifiers with labelled hard cases, and with the rules of other scorers on the same cases.

The rules are described here in our own code, by what their projects publish: math-verify's parse and verify with their
defaults; TRL's accuracy_reward, which lets math-verify read LaTeX only, boxes first; verl's scorers of GSM8K (the
number right after ####, or the last number, as text) and of MATH (the last box, as text after the normalization of
Hendrycks et al., arXiv:2103.03874).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.ground_truth import last_boxed
from posttrain.rewards import math
from posttrain.rewards.base import Completion, Rewards

AUDITED = ("math", "gsm8k", "choice", "format", "code")
OTHERS = {
    "math": {"math-verify": "by_math_verify", "TRL": "by_trl", "verl": "by_verl_math"},
    "gsm8k": {"math-verify": "by_math_verify", "verl, strict": "by_verl_strict", "verl, flexible": "by_verl_flexible"},
}
OWN = "posttrain"


@dataclass(slots=True, frozen=True, kw_only=True)
class AuditCase:
    """A completion, and whether it is correct."""

    verifier: str
    kind: str
    completion: str
    correct: bool
    columns: dict[str, Any]


@dataclass(slots=True, frozen=True, kw_only=True)
class AuditResult:
    """How one scorer decided the cases of a verifier; a failure counts as "not correct"."""

    verifier: str
    scorer: str
    cases: int
    false_positives: tuple[AuditCase, ...]
    false_negatives: tuple[AuditCase, ...]
    true_positives: int

    @property
    def precision(self) -> float:
        found = self.true_positives + len(self.false_positives)
        return self.true_positives / found if found else 1.0

    @property
    def recall(self) -> float:
        correct = self.true_positives + len(self.false_negatives)
        return self.true_positives / correct if correct else 1.0


def read_cases() -> list[AuditCase]:
    """Read the labelled cases that are part of the package."""
    lines = resources.files("posttrain.rewards").joinpath("audit_cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [as_case(json.loads(line)) for line in lines]


def read_case_file(path: str) -> list[AuditCase]:
    """Read labelled cases of a user; DataError with the line that is not one."""
    cases = []
    for number, line in enumerate(read_lines(path), 1):
        try:
            case = as_case(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"{path}:{number}: not a case ({type(error).__name__}: {error}): it must have completion, correct "
                "(true or false), and truth or columns; verifier and kind may be there"
            ) from None
        if case.verifier not in AUDITED or not isinstance(case.correct, bool) or not isinstance(case.completion, str):
            raise DataError(
                f"{path}:{number}: verifier {case.verifier!r} must be one of {', '.join(AUDITED)}, correct true or "
                "false, completion a text"
            )
        cases.append(case)
    return cases


def read_lines(path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: the cases cannot be read: {error}") from None


def as_case(row: dict[str, Any]) -> AuditCase:
    return AuditCase(
        verifier=row.get("verifier", "math"),
        kind=row.get("kind", ""),
        completion=row["completion"],
        correct=row["correct"],
        columns=row.get("columns") or {"ground_truth": row["truth"]},
    )


def audit(names: Sequence[str], cases: Sequence[AuditCase] | None = None, **limits: Any) -> list[AuditResult]:
    """Score the cases of these verifiers (None: those of the package); `limits`: of the processes, as of `Rewards`."""
    cases, results = read_cases() if cases is None else cases, []
    for name in names:
        own = [case for case in cases if case.verifier == name]
        scorers = {OWN: name} | {
            scorer: f"posttrain.rewards.audit:{rule}" for scorer, rule in OTHERS.get(name, {}).items()
        }
        completions = [
            Completion(prompt="", messages=[], text=case.completion, finish="stop", tokens=0, columns=case.columns)
            for case in own
        ]
        with Rewards(list(scorers.values()), max_failure_rate=1.0, **limits) as rewards:
            rewards.check()
            verdicts = rewards.score(completions)
        for index, scorer in enumerate(scorers):
            found = [
                bool(verdict and verdict.value and verdict.value > 0.5) for verdict in (r[index] for r in verdicts)
            ]
            results.append(_result(name, scorer, own, found))
    return results


def _result(name: str, scorer: str, cases: Sequence[AuditCase], found: Sequence[bool]) -> AuditResult:
    pairs = list(zip(cases, found, strict=True))
    return AuditResult(
        verifier=name,
        scorer=scorer,
        cases=len(cases),
        false_positives=tuple(case for case, accepted in pairs if accepted and not case.correct),
        false_negatives=tuple(case for case, accepted in pairs if case.correct and not accepted),
        true_positives=sum(accepted and case.correct for case, accepted in pairs),
    )


# Rules of other scorers


def by_math_verify(text: str, ground_truth: str) -> float:
    """math-verify with its defaults, the ground truth as a formula."""
    return math.by_library(text, ground_truth)


def by_trl(text: str, ground_truth: str) -> float:
    """LaTeX only, boxes before other formulas."""
    return math.by_library(text, ground_truth, latex_only=True)


def by_verl_strict(text: str, ground_truth: str) -> float:
    found = re.findall(r"#### (-?[0-9.,]+)", text)
    return float(bool(found) and _same_digits(found[-1], ground_truth))


def by_verl_flexible(text: str, ground_truth: str) -> float:
    found = [number for number in re.findall(r"-?[0-9.,]+", text) if number not in ("", ".")]
    return float(bool(found) and _same_digits(found[-1], ground_truth))


def _same_digits(found: str, ground_truth: str) -> bool:
    return found.replace(",", "").replace("$", "") == math.after_hashes(ground_truth).strip()


def by_verl_math(text: str, ground_truth: str) -> float:
    found = last_boxed(text)
    return float(found is not None and _normal_form(found) == _normal_form(ground_truth))


def _normal_form(text: str) -> str:
    r"""Normalize LaTeX as a text: sizes of brackets and fractions, units, degrees, percent, a/b, 0.5, spaces."""
    for old in ("\n", r"\!", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", r"\%", "%"):
        text = text.replace(old, "")
    text = text.replace(r"\tfrac", r"\frac").replace(r"\dfrac", r"\frac").split(r"\text{ ")[0]
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    name, _, value = text.partition("=")
    if value and "=" not in value and len(name.strip()) <= 2:
        text = value
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", text)
    if text == "0.5":
        text = r"\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)
