"""Formats recognised by their columns: rows become typed examples, and nothing is guessed.

A source has the format of its first row; the verdict can be printed. Whatever does not fit is a DataError
that says where, which column and why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from posttrain.data.sources import Row
from posttrain.errors import DataError
from posttrain.types import RowKind

Message: TypeAlias = dict[str, str]  # role, content

VERBS: dict[RowKind, tuple[str, ...]] = {
    "text": ("pretrain",),
    "chat": ("sft", "distill"),
    "pair": ("reward", "dpo", "simpo", "orpo", "cpo"),
    "labelled": ("kto",),
    "stepwise": ("prm",),
}
"""The commands that take each kind of row."""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
LABELS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "+": 1.0, "-": 0.0}
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A row whose columns were understood."""

    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Example):
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat(Example):
    messages: list[Message]
    plain: bool = False  # prompt and completion were mere strings, so that no chat template is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Example):
    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    margin: float = 0.0
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled(Example):
    prompt: list[Message]
    answer: list[Message]
    label: float
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepwise(Example):
    prompt: list[Message]
    steps: list[str]
    labels: list[float]  # probability that the step is right
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """A set of columns and what to make of them."""

    name: str
    kind: RowKind
    columns: tuple[str, ...]
    parse: Callable[[Row, str], Example]  # the string is the placeholder that marks the end of a step
    optional: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # columns that would give the others another meaning
    holds: Callable[[dict[str, Any]], bool] = lambda values: True

    def fits(self, values: dict[str, Any]) -> bool:
        named = all(column in values for column in self.columns) and not any(column in values for column in self.without)
        return named and self.holds(values)

    def serves(self, kind: RowKind) -> bool:
        """Pairs also serve as labelled examples: one desirable, one not."""
        return self.kind == kind or (kind, self.kind) == ("labelled", "pair")

    def describe(self, values: dict[str, Any] | None = None) -> str:
        """Its name and columns, with the optional ones that `values` has."""
        extra = [column for column in self.optional if values is not None and values.get(column) is not None]
        return f"{self.name}: {', '.join([*self.columns, *extra])}"


class SourceFormat:
    """The format of one source: recognised by its first row, demanded of all the others."""

    def __init__(self, kind: RowKind, placeholder: str) -> None:
        self.kind = kind
        self.placeholder = placeholder
        self.format: Format | None = None
        self.verdict = ""
        self._known_columns: set[tuple[str, ...]] = set()

    def examples(self, row: Row) -> list[Example]:
        """What the row holds: one example, or the two that a pair gives where labels are wanted."""
        columns = tuple(row.values)
        if self.format is None:
            self.format = recognise(row, self.kind)
            self.verdict = self.format.describe(row.values)
        elif columns not in self._known_columns:
            for column in self.format.columns:
                if column not in row.values:
                    raise _fault(row, column, f"missing column; the first row was {self.verdict}")
            found = recognise(row, self.kind)
            if found is not self.format:
                reason = f"this row is {found.describe(row.values)}; the first row was {self.verdict}"
                raise DataError(f"{row.origin}: {reason}")
        self._known_columns.add(columns)
        example = self.format.parse(row, self.placeholder)
        if self.kind == "labelled" and isinstance(example, Pair):
            shared: dict[str, Any] = {"origin": row.origin, "prompt": example.prompt, "plain": example.plain}
            return [
                Labelled(answer=example.chosen, label=1.0, **shared),
                Labelled(answer=example.rejected, label=0.0, **shared),
            ]
        return [example]


def recognise(row: Row, kind: RowKind) -> Format:
    """The one format for `kind` that the row's columns fit; DataError if there is none, or more than one."""
    fitting = [form for form in FORMATS if form.fits(row.values)]
    serving = [form for form in fitting if form.serves(kind)]
    if len(serving) == 1:
        return serving[0]
    verbs = ", ".join(VERBS[kind])
    wanted = f"{verbs} take:\n" + "\n".join(f"  {form.describe()}" for form in FORMATS if form.serves(kind))
    if serving:
        both = " or ".join(form.describe(row.values) for form in serving)
        raise DataError(f"{row.origin}: ambiguous columns: {both}; remove or rename the columns not meant")
    if fitting:
        takers = dict.fromkeys(verb for form in fitting for verb in _verbs_taking(form))
        is_a = " or ".join(form.describe(row.values) for form in fitting)
        raise DataError(f"{row.origin}: this is {is_a}, which {', '.join(takers)} take; {wanted}")
    found = ", ".join(row.values) or "none"
    raise DataError(f"{row.origin}: columns found: {found}; no known format has these; {wanted}")


def _verbs_taking(form: Format) -> list[str]:
    return [verb for kind, verbs in VERBS.items() if form.serves(kind) for verb in verbs]


# Cells


def _fault(row: Row, column: str, reason: str) -> DataError:
    return DataError(f"{row.origin}: {column}: {reason}")


def _value(row: Row, column: str) -> Any:
    value = row.values[column]
    if value is None:
        raise _fault(row, column, "null")
    return value


def _string(row: Row, column: str, value: Any) -> str:
    if value is None:
        raise _fault(row, column, "null")
    if not isinstance(value, str):
        raise _fault(row, column, f"expected text, found {type(value).__name__}")
    return value


def _filled(row: Row, column: str, value: Any, what: str) -> str:
    text = _string(row, column, value)
    if not text.strip():
        raise _fault(row, column, f"empty {what}")
    return text


def _list(row: Row, column: str) -> list[Any]:
    value = _value(row, column)
    if not isinstance(value, list):
        raise _fault(row, column, f"expected a list, found {type(value).__name__}")
    if not value:
        raise _fault(row, column, "empty list")
    return value


def _optional_text(row: Row, column: str) -> str:
    value = row.values.get(column)
    return "" if value is None else _string(row, column, value)


def _number(row: Row, column: str) -> float:
    value = _value(row, column)
    try:  # csv files have numbers as text
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise _fault(row, column, f"expected a number, found {value!r}")
    return number


def _label(row: Row, column: str, value: Any, soft: bool = False) -> float:
    if value is None:
        raise _fault(row, column, "null")
    if isinstance(value, str) and value.lower() in LABELS:
        return LABELS[value.lower()]
    if isinstance(value, int | float) and (value in (0, 1) or (soft and 0 <= value <= 1)):
        return float(value)
    wanted = 'true/false, 0/1, "+"/"-" or a number from 0 to 1' if soft else "true/false or 0/1"
    raise _fault(row, column, f"expected {wanted}, found {value!r}")


def _margin(row: Row) -> float:
    if row.values.get("margin") is not None:
        return _number(row, "margin")
    if row.values.get("chosen_score") is not None and row.values.get("rejected_score") is not None:
        return _number(row, "chosen_score") - _number(row, "rejected_score")
    return 0.0


# Conversations


def _messages(row: Row, column: str) -> list[Message]:
    if row.values.get("tools"):
        raise _fault(row, "tools", "tool definitions cannot be used yet; write them into the system message")
    return [_message(row, f"{column}[{index}]", value) for index, value in enumerate(_list(row, column))]


def _message(row: Row, column: str, value: Any) -> Message:
    """A message in either spelling: role and content, or from and value."""
    if not isinstance(value, dict):
        raise _fault(row, column, f"expected a message with role and content, found {type(value).__name__}")
    role_key, content_key = ("from", "value") if "from" in value else ("role", "content")
    for key in (role_key, content_key):
        if key not in value:
            raise _fault(row, column, f"the message has no {key!r}; its keys are: {', '.join(map(str, value))}")
    if value.get("tool_calls"):
        raise _fault(row, column, "tool_calls cannot be used yet; write the call as text into the content")
    role = _string(row, f"{column}.{role_key}", value[role_key])
    if role not in ROLES:
        raise _fault(row, f"{column}.{role_key}", f"unknown role {role!r}; known are {', '.join(ROLES)}")
    return {"role": ROLES[role], "content": _string(row, f"{column}.{content_key}", value[content_key])}


def _check_answers(row: Row, column: str, messages: list[Message]) -> None:
    """The assistant has the last word, and says something each time."""
    if messages[-1]["role"] != "assistant":
        raise _fault(row, column, f"the last message must be the assistant's, not the {messages[-1]['role']}'s")
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            raise _fault(row, f"{column}[{index}]", "empty response")


def _prompt(row: Row, column: str) -> list[Message]:
    if isinstance(_value(row, column), str):
        return [{"role": "user", "content": _filled(row, column, row.values[column], "prompt")}]
    messages = _messages(row, column)
    if messages[-1]["role"] == "assistant":
        raise _fault(row, column, "the last message of a prompt cannot be the assistant's")
    return messages


def _answer(row: Row, column: str, prompt: list[Message]) -> list[Message]:
    """What follows the prompt: text, a message, or messages that may repeat the prompt first."""
    value = _value(row, column)
    if isinstance(value, str):
        return [{"role": "assistant", "content": _filled(row, column, value, "response")}]
    messages = [_message(row, column, value)] if isinstance(value, dict) else _messages(row, column)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if not messages or messages[0]["role"] != "assistant":
        raise _fault(row, column, "expected the assistant's message after the prompt")
    _check_answers(row, column, messages)
    return messages


def _strings(row: Row, *columns: str) -> bool:
    return all(isinstance(row.values[column], str) for column in columns)


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _system(row: Row) -> list[Message]:
    system = _optional_text(row, "system")
    return [_turn("system", system)] if system else []


# Formats


def _text(row: Row, _: str) -> Example:
    return Text(origin=row.origin, text=_filled(row, "text", row.values["text"], "text"))


def _chat(row: Row, _: str) -> Example:
    messages = _messages(row, "messages")
    _check_answers(row, "messages", messages)
    return Chat(origin=row.origin, messages=messages)


def _sharegpt(row: Row, _: str) -> Example:
    messages = _system(row) + _messages(row, "conversations")
    _check_answers(row, "conversations", messages)
    return Chat(origin=row.origin, messages=messages)


def _prompt_completion(row: Row, _: str) -> Example:
    prompt = _prompt(row, "prompt")
    messages = prompt + _answer(row, "completion", prompt)
    return Chat(origin=row.origin, messages=messages, plain=_strings(row, "prompt", "completion"))


def _gsm8k(row: Row, _: str) -> Example:
    question = _filled(row, "question", row.values["question"], "question")
    answer = _filled(row, "answer", row.values["answer"], "response")
    return Chat(origin=row.origin, messages=[_turn("user", question), _turn("assistant", answer)])


def _alpaca_prompt(row: Row) -> list[Message]:
    messages = _system(row)
    for index, exchange in enumerate(row.values.get("history") or []):
        column = f"history[{index}]"
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise _fault(row, column, "expected a list of [question, answer]")
        messages.append(_turn("user", _string(row, column, exchange[0])))
        messages.append(_turn("assistant", _filled(row, column, exchange[1], "response")))
    instruction = _string(row, "instruction", row.values["instruction"])
    question = "\n".join(part for part in (instruction, _optional_text(row, "input")) if part)
    if not question.strip():
        raise _fault(row, "instruction", "empty prompt")
    return [*messages, _turn("user", question)]


def _alpaca(row: Row, _: str) -> Example:
    answer = _filled(row, "output", row.values["output"], "response")
    return Chat(origin=row.origin, messages=[*_alpaca_prompt(row), _turn("assistant", answer)])


def _alpaca_pair(row: Row, _: str) -> Example:
    prompt = _alpaca_prompt(row)
    chosen, rejected = _answer(row, "chosen", prompt), _answer(row, "rejected", prompt)
    return Pair(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(row))


def _alpaca_output_pair(row: Row, _: str) -> Example:
    output = _list(row, "output")
    if len(output) != 2:
        raise _fault(row, "output", f"expected [chosen, rejected], found a list of {len(output)}")
    chosen, rejected = ([_turn("assistant", _filled(row, "output", text, "response"))] for text in output)
    prompt = _alpaca_prompt(row)
    return Pair(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(row))


def _pair(row: Row, _: str) -> Example:
    prompt = _prompt(row, "prompt")
    chosen, rejected = _answer(row, "chosen", prompt), _answer(row, "rejected", prompt)
    plain = _strings(row, "prompt", "chosen", "rejected")
    return Pair(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(row), plain=plain)


def _sharegpt_pair(row: Row, _: str) -> Example:
    prompt = _system(row) + _prompt(row, "conversations")
    chosen, rejected = _answer(row, "chosen", prompt), _answer(row, "rejected", prompt)
    return Pair(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(row))


def _hh_pair(row: Row, _: str) -> Example:
    chosen, rejected = _dialogue(row, "chosen"), _dialogue(row, "rejected")
    prompt = chosen[:-1]
    if prompt != rejected[:-1]:
        raise _fault(row, "rejected", "does not begin with the same prompt as chosen")
    return Pair(origin=row.origin, prompt=prompt, chosen=chosen[-1:], rejected=rejected[-1:], margin=_margin(row))


def _dialogue(row: Row, column: str) -> list[Message]:
    """Turns of a text with Human: and Assistant:; a marker repeated without an answer between continues the turn.

    An empty last answer stays: in these files silence is at times what people preferred.
    """
    if isinstance(_value(row, column), list):
        messages = _messages(row, column)
        _check_answers(row, column, messages[-1:])
    else:
        before, *parts = HH_TURN.split(_string(row, column, row.values[column]))
        if before.strip() or not parts:
            raise _fault(row, column, r'expected "\n\nHuman: ...\n\nAssistant: ...", or a column prompt as well')
        messages = []
        for name, text in zip(parts[0::2], parts[1::2], strict=True):
            role = ROLES[name.lower()]
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] = f"{messages[-1]['content']}\n\n{text.strip()}".strip()
            else:
                messages.append(_turn(role, text.strip()))
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise _fault(row, column, "expected a prompt and then the assistant's answer")
    return messages


def _labelled_chat(row: Row, _: str) -> Example:
    messages = _messages(row, "messages")
    _check_answers(row, "messages", messages[-1:])
    if len(messages) < 2:
        raise _fault(row, "messages", "expected a prompt before the assistant's message")
    label = _label(row, "label", row.values["label"])
    return Labelled(origin=row.origin, prompt=messages[:-1], answer=messages[-1:], label=label)


def _labelled_completion(row: Row, _: str) -> Example:
    prompt = _prompt(row, "prompt")
    answer, label = _answer(row, "completion", prompt), _label(row, "label", row.values["label"])
    plain = _strings(row, "prompt", "completion")
    return Labelled(origin=row.origin, prompt=prompt, answer=answer, label=label, plain=plain)


def _step_texts(row: Row, column: str, placeholder: str) -> list[str]:
    steps = [_filled(row, f"{column}[{i}]", step, "step") for i, step in enumerate(_list(row, column))]
    for index, step in enumerate(steps):
        if placeholder in step:
            raise _fault(row, f"{column}[{index}]", f"the step contains the placeholder {placeholder!r} itself")
    return steps


def _step_labels(row: Row, column: str, steps: int, what: str) -> list[float]:
    labels = [_label(row, f"{column}[{i}]", value, soft=True) for i, value in enumerate(_list(row, column))]
    if len(labels) != steps:
        raise _fault(row, column, f"{len(labels)} labels for {steps} {what}")
    return labels


def _stepwise(row: Row, placeholder: str) -> Example:
    steps = _step_texts(row, "completions", placeholder)
    labels = _step_labels(row, "labels", len(steps), "completions")
    plain = _strings(row, "prompt")
    return Stepwise(origin=row.origin, prompt=_prompt(row, "prompt"), steps=steps, labels=labels, plain=plain)


def _processbench(row: Row, placeholder: str) -> Example:
    """`label` is the index of the first wrong step, -1 if there is none; steps after it have no label."""
    problem = _filled(row, "problem", row.values["problem"], "prompt")
    steps = _step_texts(row, "steps", placeholder)
    label = _number(row, "label")
    if label not in range(-1, len(steps)):
        raise _fault(row, "label", f"expected -1 or the index of one of the {len(steps)} steps, found {label:g}")
    wrong = int(label)
    labels = [1.0] * len(steps) if wrong < 0 else [1.0] * wrong + [0.0]
    # The solutions were split into steps at blank lines: put these back.
    texts = [steps[0], *(f"\n\n{step}" for step in steps[1:])][: len(labels)]
    return Stepwise(origin=row.origin, prompt=[_turn("user", problem)], steps=texts, labels=labels, plain=True)


def _marked_steps(column: str) -> Callable[[Row, str], Example]:
    """Text with a placeholder after each step. What follows the last one cannot matter to it, and is left out."""

    def parse(row: Row, placeholder: str) -> Example:
        *steps, _ = _string(row, "input", row.values["input"]).split(placeholder)
        if not steps:
            raise _fault(row, "input", f"the placeholder {placeholder!r} does not occur")
        if not all(step.strip() for step in steps):
            raise _fault(row, "input", f"empty step before a placeholder {placeholder!r}")
        labels = _step_labels(row, column, len(steps), f"placeholders {placeholder!r}")
        return Stepwise(origin=row.origin, prompt=[], steps=steps, labels=labels, plain=True)

    return parse


MARGIN = ("margin", "chosen_score", "rejected_score")
ALPACA = ("input", "history", "system")
PROMPTS = ("prompt", "instruction", "conversations", "messages", "question", "problem", "input")

FORMATS = (
    Format("text", "text", ("text",), _text),
    Format("chat", "chat", ("messages",), _chat, without=("label",)),
    Format("prompt and completion", "chat", ("prompt", "completion"), _prompt_completion, without=("label",)),
    Format(
        "Alpaca",
        "chat",
        ("instruction", "output"),
        _alpaca,
        ALPACA,
        without=("label",),
        holds=lambda values: not isinstance(values["output"], list),
    ),
    Format(
        "ShareGPT", "chat", ("conversations",), _sharegpt, ("system",), without=("chosen", "rejected", "label")
    ),
    Format("GSM8K", "chat", ("question", "answer"), _gsm8k, without=("label",)),
    Format("preference", "pair", ("prompt", "chosen", "rejected"), _pair, MARGIN),
    Format("hh-rlhf", "pair", ("chosen", "rejected"), _hh_pair, MARGIN, without=PROMPTS),
    Format(
        "ShareGPT pairwise", "pair", ("conversations", "chosen", "rejected"), _sharegpt_pair, ("system", *MARGIN)
    ),
    Format("Alpaca pairwise", "pair", ("instruction", "chosen", "rejected"), _alpaca_pair, (*ALPACA, *MARGIN)),
    Format(
        "Alpaca pairwise",
        "pair",
        ("instruction", "output"),
        _alpaca_output_pair,
        (*ALPACA, *MARGIN),
        without=("chosen", "rejected"),
        holds=lambda values: isinstance(values["output"], list),
    ),
    Format("labelled chat", "labelled", ("messages", "label"), _labelled_chat),
    Format("labelled completion", "labelled", ("prompt", "completion", "label"), _labelled_completion),
    Format("steps", "stepwise", ("prompt", "completions", "labels"), _stepwise),
    Format("ProcessBench", "stepwise", ("problem", "steps", "label"), _processbench),
    Format("marked steps", "stepwise", ("input", "value"), _marked_steps("value"), without=("instruction",)),
    Format(
        "marked steps",
        "stepwise",
        ("input", "label"),
        _marked_steps("label"),
        without=("instruction", "value"),
        holds=lambda values: isinstance(values["label"], list),
    ),
)
