"""Formats recognised by their columns: rows become typed examples, and nothing is guessed.

A source has the format of its first row; the verdict can be printed. Whatever does not fit is a DataError
that says where, which column and why.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import DataError
from posttrain.core.types import ExampleKind
from posttrain.data.reading.columns import KeyMap
from posttrain.data.reading.examples import (
    ROLES,
    ChatExample,
    Example,
    LabelledExample,
    Message,
    PairExample,
    PromptExample,
    StepwiseExample,
    TextExample,
    answer_of,
    are_strings,
    check_answers,
    fault,
    filled_text,
    label_of,
    list_of,
    margin,
    messages_of,
    number,
    optional_text,
    prompt_of,
    system_of,
    text_of,
    tools_of,
    turn,
    value_of,
)
from posttrain.data.reading.records import Record

VERBS: dict[ExampleKind, tuple[str, ...]] = {
    "text": ("pretrain",),
    "chat": ("sft", "distill"),
    "pair": ("reward", "dpo", "simpo", "orpo", "cpo"),
    "labelled": ("kto",),
    "stepwise": ("prm",),
    "prompt": (),  # reinforcement learning
}
"""The commands that take each kind of row."""

LETTERS = "ABCDEFGHIJ"  # of the options of a question
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


@dataclass(frozen=True, slots=True)
class Format:
    """A set of columns and what to make of them."""

    name: str
    kind: ExampleKind
    columns: tuple[str, ...]
    parse: Callable[[Record, str], Example]  # the string is the placeholder that marks the end of a step
    optional: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # columns that would give the others another meaning
    holds: Callable[[dict[str, Any]], bool] = lambda values: True

    def fits(self, values: dict[str, Any]) -> bool:
        """Whether a row with these values can be read so."""
        missing = any(column not in values for column in self.columns)
        foreign = any(column in values for column in self.without)
        return not missing and not foreign and self.holds(values)

    def serves(self, kind: ExampleKind) -> bool:
        """Pairs also serve as labelled examples, good and bad; conversations as prompts with a known answer."""
        return self.kind == kind or (kind, self.kind) in (("labelled", "pair"), ("prompt", "chat"))

    def describe(self, values: dict[str, Any] | None = None) -> str:
        """Its name and columns; of the optional ones those that `values` has."""
        columns: Sequence[str] = self.columns
        if values is not None:
            used = {*self.columns, *(column for column in self.optional if values.get(column) is not None)}
            columns = [column for column in values if column in used]
        return f"{self.name}: {', '.join(columns)}"


class SourceFormat:
    """The format of one source: recognised by its first row, demanded of all the others."""

    def __init__(self, kind: ExampleKind, placeholder: str, map_keys: str | Mapping[str, Any] = "") -> None:
        self.kind = kind
        self.placeholder = placeholder
        self.keys = KeyMap.parse(map_keys)
        self.format: Format | None = None
        self.verdict = ""
        self._known_columns: set[tuple[str, ...]] = set()

    def examples(self, row: Record) -> list[Example]:
        """What the row holds: one example, or the two that a pair gives where labels are wanted."""
        row = self.keys.apply(row)
        columns = tuple(row.values)
        if self.format is None:
            self.format = recognise(row, self.kind)
            self.verdict = self.format.describe(row.values)
            if self.kind == "prompt" and self.format.kind == "chat":
                kept = "" if "ground_truth" in row.values else " and kept as ground_truth"
                self.verdict += f"; the last answer is not shown{kept}"
        elif columns not in self._known_columns:
            for column in self.format.columns:
                if column not in row.values:
                    raise fault(row, column, f"missing column; the first row was {self.verdict}")
            found = recognise(row, self.kind)
            if found is not self.format:
                reason = f"this row is {found.describe(row.values)}; the first row was {self.verdict}"
                raise DataError(f"{row.origin}: {reason}")
        self._known_columns.add(columns)
        example = self.format.parse(row, self.placeholder)
        if self.kind == "labelled" and isinstance(example, PairExample):
            shared: dict[str, Any] = {"origin": row.origin, "prompt": example.prompt, "plain": example.plain}
            return [
                LabelledExample(answer=example.chosen, label=1.0, **shared),
                LabelledExample(answer=example.rejected, label=0.0, **shared),
            ]
        if self.kind == "prompt" and isinstance(example, ChatExample):
            return [_question(row, example)]
        return [example]


def recognise(row: Record, kind: ExampleKind) -> Format:
    """The one format for `kind` that the row's columns fit; DataError if there is none, or more than one."""
    fitting = [form for form in FORMATS if form.fits(row.values)]
    serving = [form for form in fitting if form.serves(kind)]
    if kind == "prompt":  # where a row has a prompt of its own, this is the prompt, whatever else it has
        serving = [form for form in serving if form.kind == "prompt"] or serving
    if len(serving) == 1:
        return serving[0]
    wanted = f"Formats for {_named(VERBS[kind])}:\n" + "\n".join(
        f"  {form.describe()}" for form in FORMATS if form.serves(kind)
    )
    if serving:
        both = " or ".join(form.describe(row.values) for form in serving)
        raise DataError(f"{row.origin}: ambiguous columns: {both}; remove or rename the columns not meant")
    if fitting:
        takers = tuple(dict.fromkeys(verb for form in fitting for verb in _verbs_taking(form)))
        is_a = " or ".join(form.describe(row.values) for form in fitting)
        raise DataError(f"{row.origin}: this is {is_a}; data for {_named(takers)}. {wanted}")
    found = ", ".join(row.values) or "none"
    rename = 'data.map_keys gives columns other names, as --data.map_keys \'{"prompt": "COLUMN"}\'.'
    raise DataError(f"{row.origin}: columns found: {found}; no known format has these; {rename} {wanted}")


def _named(verbs: Sequence[str]) -> str:
    return ", ".join(verbs) or "reinforcement learning"


def _verbs_taking(form: Format) -> list[str]:
    return [verb for kind, verbs in VERBS.items() if form.serves(kind) for verb in verbs]


# What each format is made of


def _text(row: Record, _: str) -> Example:
    return TextExample(origin=row.origin, text=filled_text(row, "text", row.values["text"], "text"))


def _chat(row: Record, _: str) -> Example:
    messages = messages_of(row, "messages", tools_too=True)
    check_answers(row, "messages", messages)
    return ChatExample(origin=row.origin, messages=messages, tools=tools_of(row))


def _sharegpt(row: Record, _: str) -> Example:
    messages = messages_of(row, "conversations", tools_too=True)
    check_answers(row, "conversations", messages)
    return ChatExample(origin=row.origin, messages=system_of(row) + messages, tools=tools_of(row))


def _prompt_completion(row: Record, _: str) -> Example:
    prompt = prompt_of(row, "prompt")
    messages = prompt + answer_of(row, "completion", prompt)
    return ChatExample(origin=row.origin, messages=messages, plain=are_strings(row, "prompt", "completion"))


def _question_answer(row: Record, _: str) -> Example:
    question = filled_text(row, "question", row.values["question"], "question")
    answer = filled_text(row, "answer", row.values["answer"], "response")
    return ChatExample(origin=row.origin, messages=[turn("user", question), turn("assistant", answer)])


def _multiple_choice(row: Record, _: str) -> Example:
    """The question and its options, a line each; the answer is the letter of the right one."""
    question = filled_text(row, "question", row.values["question"], "question")
    options = _options(row)
    wanted = row.values["answer"]
    letters, text = LETTERS[: len(options)], str(wanted).strip()
    places = [wanted] if isinstance(wanted, int) else [at for at, name in enumerate(letters) if name == text.upper()]
    at = next(iter([*places, *(at for at, option in enumerate(options) if option == text)]), -1)
    if isinstance(wanted, bool) or not 0 <= at < len(options):
        allowed = f"{', '.join(letters)}, the place of one, from 0, or its text"
        raise fault(row, "answer", f"is {wanted!r}; it must be one of {allowed}")
    lines = [question, *(f"{name}. {text}" for name, text in zip(LETTERS, options, strict=False))]
    return ChatExample(origin=row.origin, messages=[turn("user", "\n".join(lines)), turn("assistant", LETTERS[at])])


def _has_options(values: dict[str, Any]) -> bool:
    return isinstance(values.get("choices"), list) or ("A" in values and "B" in values and "choices" not in values)


def _options(row: Record) -> list[str]:
    """In a column `choices`, or in columns A, B and so on."""
    values = row.values
    named = {letter: values[letter] for letter in LETTERS if letter in values}
    listed = values["choices"] if "choices" in values else list(named.values())
    if not isinstance(listed, list) or not 2 <= len(listed) <= len(LETTERS):
        raise fault(row, "choices", f"must be a list of 2 to {len(LETTERS)} options")
    if "choices" not in values and list(named) != list(LETTERS[: len(named)]):
        raise fault(row, "A", f"the options are {', '.join(named)}: one in between is missing")
    for place, option in enumerate(listed):
        if option is None or not str(option).strip():
            raise fault(row, "choices" if "choices" in values else LETTERS[place], "an option is empty")
    return [str(option).strip() for option in listed]


def _prompt(row: Record, _: str) -> Example:
    prompt = prompt_of(row, "prompt", tools_too=True)
    plain = are_strings(row, "prompt")
    return PromptExample(origin=row.origin, prompt=prompt, plain=plain, tools=tools_of(row), columns=row.values)


def _asked(row: Record, _: str) -> Example:
    prompt = prompt_of(row, "messages", tools_too=True)
    return PromptExample(origin=row.origin, prompt=prompt, tools=tools_of(row), columns=row.values)


def _ends_asking(values: dict[str, Any]) -> bool:
    messages = values["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and ROLES.get(str(last.get("role", last.get("from")))) in ("user", "tool")


def _has_truth(values: dict[str, Any]) -> bool:
    judge = values.get("reward_model")
    return isinstance(judge, dict) and "ground_truth" in judge


def _verl(row: Record, _: str) -> Example:
    columns = {"ground_truth": row.values["reward_model"]["ground_truth"], **row.values}
    return PromptExample(origin=row.origin, prompt=prompt_of(row, "prompt", tools_too=True), columns=columns)


def _question(row: Record, chat: ChatExample) -> PromptExample:
    """A conversation up to its last answer, which is the ground truth; of GSM8K's what stands after the mark."""
    *prompt, answer = chat.messages
    truth = answer["content"]
    if _is_gsm8k(row.values):
        truth = truth.rpartition("####")[2].strip()
        if not truth:
            raise fault(row, "answer", 'nothing comes after "####"')
    columns = {"ground_truth": truth, **row.values}
    return PromptExample(origin=chat.origin, prompt=prompt, plain=chat.plain, tools=chat.tools, columns=columns)


def _is_gsm8k(values: dict[str, Any]) -> bool:
    return "question" in values and "####" in str(values.get("answer"))


def _alpaca_prompt(row: Record, question: str = "instruction", more: str = "input") -> list[Message]:
    messages = system_of(row)
    history = list_of(row, "history") if row.values.get("history") else []
    for index, exchange in enumerate(history):
        column = f"history[{index}]"
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise fault(row, column, "expected a list of [question, answer]")
        messages.append(turn("user", text_of(row, column, exchange[0])))
        messages.append(turn("assistant", filled_text(row, column, exchange[1], "response")))
    asked = text_of(row, question, row.values[question])
    text = "\n".join(part for part in (asked, optional_text(row, more)) if part)
    if not text.strip():
        raise fault(row, question, "empty prompt")
    return [*messages, turn("user", text)]


def _alpaca(row: Record, _: str) -> Example:
    answer = filled_text(row, "output", row.values["output"], "response")
    return ChatExample(origin=row.origin, messages=[*_alpaca_prompt(row), turn("assistant", answer)])


def _prompt_response(row: Record, _: str) -> Example:
    answer = filled_text(row, "response", row.values["response"], "response")
    return ChatExample(origin=row.origin, messages=[*_alpaca_prompt(row, "prompt", "query"), turn("assistant", answer)])


def _alpaca_pair(row: Record, _: str) -> Example:
    prompt = _alpaca_prompt(row)
    chosen, rejected = answer_of(row, "chosen", prompt), answer_of(row, "rejected", prompt)
    return PairExample(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin(row))


def _alpaca_output_pair(row: Record, _: str) -> Example:
    output = list_of(row, "output")
    if len(output) != 2:
        raise fault(row, "output", f"expected [chosen, rejected], found a list of {len(output)}")
    chosen, rejected = ([turn("assistant", filled_text(row, "output", text, "response"))] for text in output)
    prompt = _alpaca_prompt(row)
    return PairExample(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin(row))


def _pair(row: Record, _: str) -> Example:
    prompt = prompt_of(row, "prompt")
    chosen, rejected = answer_of(row, "chosen", prompt), answer_of(row, "rejected", prompt)
    plain = are_strings(row, "prompt", "chosen", "rejected")
    return PairExample(
        origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin(row), plain=plain
    )


def _sharegpt_pair(row: Record, _: str) -> Example:
    prompt = system_of(row) + prompt_of(row, "conversations")
    chosen, rejected = answer_of(row, "chosen", prompt), answer_of(row, "rejected", prompt)
    return PairExample(origin=row.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin(row))


def _hh_pair(row: Record, _: str) -> Example:
    chosen, rejected = _dialogue(row, "chosen"), _dialogue(row, "rejected")
    prompt = chosen[:-1]
    if prompt != rejected[:-1]:
        raise fault(row, "rejected", "does not begin with the same prompt as chosen")
    return PairExample(origin=row.origin, prompt=prompt, chosen=chosen[-1:], rejected=rejected[-1:], margin=margin(row))


def _dialogue(row: Record, column: str) -> list[Message]:
    """Turns of a text with Human: and Assistant:; a marker repeated without an answer between continues the turn.

    An empty last answer stays: in these files silence is at times what people preferred.
    """
    if isinstance(value_of(row, column), list):
        messages = messages_of(row, column)
        check_answers(row, column, messages, first=len(messages) - 1)
    else:
        before, *parts = HH_TURN.split(text_of(row, column, row.values[column]))
        if before.strip() or not parts:
            raise fault(row, column, r'expected "\n\nHuman: ...\n\nAssistant: ...", or a column prompt as well')
        messages = []
        for name, text in zip(parts[0::2], parts[1::2], strict=True):
            role = ROLES[name.lower()]
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] = f"{messages[-1]['content']}\n\n{text.strip()}".strip()
            else:
                messages.append(turn(role, text.strip()))
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise fault(row, column, "expected a prompt and then the assistant's answer")
    return messages


def _labelled_chat(row: Record, _: str) -> Example:
    messages = messages_of(row, "messages")
    check_answers(row, "messages", messages, first=len(messages) - 1)
    if len(messages) < 2:
        raise fault(row, "messages", "expected a prompt before the assistant's message")
    label = label_of(row, "label", row.values["label"])
    return LabelledExample(origin=row.origin, prompt=messages[:-1], answer=messages[-1:], label=label)


def _labelled_completion(row: Record, _: str) -> Example:
    prompt = prompt_of(row, "prompt")
    answer, label = answer_of(row, "completion", prompt), label_of(row, "label", row.values["label"])
    plain = are_strings(row, "prompt", "completion")
    return LabelledExample(origin=row.origin, prompt=prompt, answer=answer, label=label, plain=plain)


def _step_texts(row: Record, column: str, placeholder: str) -> list[str]:
    steps = [filled_text(row, f"{column}[{i}]", step, "step") for i, step in enumerate(list_of(row, column))]
    for index, step in enumerate(steps):
        if placeholder in step:
            raise fault(row, f"{column}[{index}]", f"the step contains the placeholder {placeholder!r} itself")
    return steps


def _step_labels(row: Record, column: str, steps: int, what: str) -> list[float]:
    labels = [label_of(row, f"{column}[{i}]", value, soft=True) for i, value in enumerate(list_of(row, column))]
    if len(labels) != steps:
        raise fault(row, column, f"{len(labels)} labels for {steps} {what}")
    return labels


def _stepwise(row: Record, placeholder: str) -> Example:
    steps = _step_texts(row, "completions", placeholder)
    labels = _step_labels(row, "labels", len(steps), "completions")
    plain = are_strings(row, "prompt")
    return StepwiseExample(origin=row.origin, prompt=prompt_of(row, "prompt"), steps=steps, labels=labels, plain=plain)


def _processbench(row: Record, placeholder: str) -> Example:
    """`label` is the index of the first wrong step, -1 if there is none; steps after it have no label."""
    problem = filled_text(row, "problem", row.values["problem"], "prompt")
    steps = _step_texts(row, "steps", placeholder)
    label = number(row, "label")
    if label not in range(-1, len(steps)):
        raise fault(row, "label", f"expected -1 or the index of one of the {len(steps)} steps, found {label:g}")
    wrong = int(label)
    labels = [1.0] * len(steps) if wrong < 0 else [1.0] * wrong + [0.0]
    # The solutions were split into steps at blank lines: put these back.
    texts = [steps[0], *(f"\n\n{step}" for step in steps[1:])][: len(labels)]
    return StepwiseExample(origin=row.origin, prompt=[turn("user", problem)], steps=texts, labels=labels, plain=True)


def _marked_steps(column: str) -> Callable[[Record, str], Example]:
    """Text with a placeholder after each step. What follows the last one cannot matter to it, and is left out."""

    def parse(row: Record, placeholder: str) -> Example:
        *steps, _ = text_of(row, "input", row.values["input"]).split(placeholder)
        if not steps:
            raise fault(row, "input", f"the placeholder {placeholder!r} does not occur")
        if not all(step.strip() for step in steps):
            raise fault(row, "input", f"empty step before a placeholder {placeholder!r}")
        labels = _step_labels(row, column, len(steps), f"placeholders {placeholder!r}")
        return StepwiseExample(origin=row.origin, prompt=[], steps=steps, labels=labels, plain=True)

    return parse


MARGIN = ("margin", "chosen_score", "rejected_score")
ALPACA = ("input", "history", "system")
ANSWERS = ("completion", "completions", "response", "chosen", "rejected", "label")
PROMPTS = ("prompt", "instruction", "conversations", "messages", "question", "problem", "input")

FORMATS = (
    Format("text", "text", ("text",), _text),
    Format("chat", "chat", ("messages",), _chat, ("tools",), without=("label",)),
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
        "prompt and response",
        "chat",
        ("prompt", "response"),
        _prompt_response,
        ("query", "history", "system"),
        without=("label", "completion"),
    ),
    Format(
        "ShareGPT",
        "chat",
        ("conversations",),
        _sharegpt,
        ("system", "tools"),
        without=("chosen", "rejected", "label"),
    ),
    Format("GSM8K", "chat", ("question", "answer"), _question_answer, without=("label",), holds=_is_gsm8k),
    Format(
        "question and answer",
        "chat",
        ("question", "answer"),
        _question_answer,
        without=("label",),
        holds=lambda values: not _is_gsm8k(values) and not _has_options(values),
    ),
    Format(
        "multiple choice",
        "chat",
        ("question", "A", "B", "answer"),
        _multiple_choice,
        tuple(LETTERS[2:]),
        without=("label", "choices"),
        holds=lambda values: not _is_gsm8k(values),
    ),
    Format(
        "multiple choice",
        "chat",
        ("question", "choices", "answer"),
        _multiple_choice,
        without=("label",),
        holds=lambda values: not _is_gsm8k(values) and isinstance(values["choices"], list),
    ),
    Format(
        "prompt",
        "prompt",
        ("prompt",),
        _prompt,
        ("tools",),
        without=ANSWERS,
        holds=lambda values: not _has_truth(values),
    ),
    Format("messages to answer", "prompt", ("messages",), _asked, ("tools",), without=("label",), holds=_ends_asking),
    Format(
        "verl",
        "prompt",
        ("prompt", "reward_model"),
        _verl,
        ("extra_info",),
        without=ANSWERS,
        holds=_has_truth,
    ),
    Format("preference", "pair", ("prompt", "chosen", "rejected"), _pair, MARGIN),
    Format("hh-rlhf", "pair", ("chosen", "rejected"), _hh_pair, MARGIN, without=PROMPTS),
    Format("ShareGPT pairwise", "pair", ("conversations", "chosen", "rejected"), _sharegpt_pair, ("system", *MARGIN)),
    Format("Alpaca pairwise", "pair", ("instruction", "chosen", "rejected"), _alpaca_pair, (*ALPACA, *MARGIN)),
    Format(
        "Alpaca pairwise, output a list of two",
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
