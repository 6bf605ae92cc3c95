"""The verifier `code`: runs tests on programs that a model wrote, in the sandbox of sandbox/programs.py."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.data.ground_truth import TRUTH_SOURCES, ground_truth_of
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import settings, verifier
from posttrain.sandbox.programs import ProgramResult, isolation, run_program

TEST_COLUMNS = ("tests", "test_list", "test", "inputs", "input_output", *TRUTH_SOURCES)
FENCE = re.compile(r"(?:```|~~~)[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:```|~~~)", re.DOTALL)
OPEN_FENCE = re.compile(r"(?:```|~~~)[ \t]*(?:python|py|python3)[ \t]*\n", re.IGNORECASE)
PYTHON = ("python", "py", "python3")
TIME_SHARE = 0.6  # of the verifier's time limit, for all tests of one program
REASON_LIMIT = 500  # characters


@dataclass(slots=True, frozen=True)
class ProgramTests:
    """Either statements that raise an exception if they fail, or inputs with the expected outputs."""

    statements: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()


def check_isolation() -> None:
    """Raise a UsageError if programs cannot be isolated here and the user does not allow them to run unprotected."""
    mode, problem = isolation()
    if mode == "unprotected" and not settings.allow_unprotected_code:
        raise UsageError(
            f"programs that the model writes cannot be isolated on this machine: {problem}. docs/rewards.md lists "
            "what is needed. With reward.allow_unprotected_code they run with your user's permissions: they can then "
            "read and change your files and use the network"
        )


@verifier("code", prepare=check_isolation, columns=TEST_COLUMNS)
def score_code(completion: Completion) -> tuple[float, str]:
    """1 if the program in the completion passes all tests of the example (asserts, or inputs and outputs), else 0."""
    tests = find_tests(completion.columns)
    program = program_of(completion.text)
    if not program.strip():
        return 0.0, "no program"
    deadline = time.monotonic() + TIME_SHARE * settings.seconds
    if tests.statements:
        failure = run_statements(program, tests.statements, deadline)
        return (0.0, failure) if failure else (1.0, "all tests passed")
    for number, (given, expected) in enumerate(tests.pairs, start=1):
        failure = run_input(program, given, expected, deadline)
        if failure:
            return 0.0, f"test {number} of {len(tests.pairs)}: {failure}"
    return 1.0, f"all {len(tests.pairs)} tests passed"


def program_of(text: str) -> str:
    """Return the last fenced block of Python, else the last fenced block, else the whole text.

    A block of Python that is not closed, and is the only one, goes to the end of the text.
    """
    blocks = FENCE.findall(text)
    python = [body for language, body in blocks if language.lower() in PYTHON]
    if python:
        return python[-1]
    opened = None if blocks else OPEN_FENCE.search(text)
    return blocks[-1][1] if blocks else text[opened.end() :] if opened else text


def find_tests(columns: dict[str, Any]) -> ProgramTests:
    """Read tests in the formats of common data sets; a LookupError if the example has none."""
    source = dict(columns)
    for nested in (ground_truth_of(columns), columns.get("input_output"), columns.get("tests")):
        if isinstance(nested, str) and nested.lstrip().startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                nested = json.loads(nested)
        if isinstance(nested, dict):
            source |= nested
    if source.get("inputs") is not None and source.get("outputs") is not None:
        pairs = zip(map(_text, source["inputs"]), map(_text, source["outputs"]), strict=True)
        return _not_empty(ProgramTests(pairs=tuple(pairs)))
    if isinstance(source.get("test"), str) and source.get("entry_point"):  # HumanEval
        return ProgramTests(statements=(source["test"], f"check({source['entry_point']})"))
    for name in ("tests", "test_list", "test", "ground_truth"):
        found = source.get(name)
        if isinstance(found, str) and found.lstrip().startswith("["):
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(found)
        if isinstance(found, str) and "assert" in found:
            found = [found]
        if isinstance(found, list) and found and all(isinstance(test, str) for test in found):
            setup = source.get("test_setup_code")
            return ProgramTests(statements=(*([setup] if setup else []), *found))
    return _not_empty(ProgramTests(), columns)


def _not_empty(tests: ProgramTests, columns: dict[str, Any] | None = None) -> ProgramTests:
    if not tests.pairs:
        known = f"; its columns are {', '.join(columns)}" if columns else ""
        raise LookupError(f"the example has no tests: expected `tests` (asserts), or `inputs` and `outputs`{known}")
    return tests


def _text(value: Any) -> str:
    """Inputs and outputs may be a text or a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def run_statements(program: str, statements: tuple[str, ...], deadline: float) -> str:
    """Run the program with statements appended; returns what went wrong, or "".

    The last statement prints a random token: without it, a program that exits early would pass.
    """
    token = secrets.token_hex(8)
    result = run("\n\n".join((program, *statements, f'print("\\n{token}")')), "", deadline)
    if result.code == 0 and result.output.rstrip().endswith(token):
        return ""
    return describe_failure(result) or "the program ended before the tests"


def run_input(program: str, given: str, expected: str, deadline: float) -> str:
    """Run the program with this input; returns what went wrong, or ""."""
    result = run(program, given, deadline)
    failure = describe_failure(result)
    if failure:
        return failure
    found, right = _lines(result.output), _lines(expected)
    return "" if found == right else f"printed {result.output[:100]!r}, expected {expected[:100]!r}"


def run(program: str, given: str, deadline: float) -> ProgramResult:
    return run_program(program, given, deadline, allow_unprotected=settings.allow_unprotected_code)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def describe_failure(result: ProgramResult) -> str:
    if result.code is None:
        return "it took too long or printed too much"
    if result.code != 0:
        return f"exit code {result.code}: {result.errors.strip()[-REASON_LIMIT:]}"
    return ""
