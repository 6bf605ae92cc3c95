"""Parse the records of each data format into examples."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from posttrain.data.reading.cells import (
    ROLES,
    are_strings,
    cell_error,
    check_assistant_messages,
    completion_of,
    filled_text,
    label_of,
    list_of,
    make_message,
    margin_of,
    messages_of,
    number_of,
    optional_text,
    prompt_of,
    system_of,
    text_of,
    tools_of,
    value_of,
)
from posttrain.data.reading.examples import (
    ChatExample,
    Example,
    LabelledExample,
    Message,
    PairExample,
    PromptExample,
    StepwiseExample,
    TextExample,
)
from posttrain.data.reading.records import Record

LETTERS = "ABCDEFGHIJ"  # names of the options of a multiple-choice question
HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def parse_text(record: Record, _: str) -> Example:
    return TextExample(origin=record.origin, text=filled_text(record, "text", record.values["text"], "text"))


def parse_chat(record: Record, _: str) -> Example:
    messages = messages_of(record, "messages", allow_tools=True)
    check_assistant_messages(record, "messages", messages)
    return ChatExample(origin=record.origin, messages=messages, tools=tools_of(record))


def parse_sharegpt(record: Record, _: str) -> Example:
    messages = messages_of(record, "conversations", allow_tools=True)
    check_assistant_messages(record, "conversations", messages)
    return ChatExample(origin=record.origin, messages=system_of(record) + messages, tools=tools_of(record))


def parse_prompt_completion(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt")
    messages = prompt + completion_of(record, "completion", prompt)
    return ChatExample(origin=record.origin, messages=messages, plain=are_strings(record, "prompt", "completion"))


def parse_question_answer(record: Record, _: str) -> Example:
    question = filled_text(record, "question", record.values["question"], "question")
    completion = filled_text(record, "answer", record.values["answer"], "completion")
    return ChatExample(
        origin=record.origin, messages=[make_message("user", question), make_message("assistant", completion)]
    )


def parse_multiple_choice(record: Record, _: str) -> Example:
    """Write the question and its options, one per line; the completion is the letter of the correct one."""
    question = filled_text(record, "question", record.values["question"], "question")
    options = _read_options(record)
    wanted = record.values["answer"]
    letters, text = LETTERS[: len(options)], str(wanted).strip()
    places = [wanted] if isinstance(wanted, int) else [at for at, name in enumerate(letters) if name == text.upper()]
    at = next(iter([*places, *(at for at, option in enumerate(options) if option == text)]), -1)
    if isinstance(wanted, bool) or not 0 <= at < len(options):
        allowed = f"{', '.join(letters)}, the index of an option from 0, or its text"
        raise cell_error(record, "answer", f"is {wanted!r}; it must be one of {allowed}")
    lines = [question, *(f"{name}. {text}" for name, text in zip(LETTERS, options, strict=False))]
    return ChatExample(
        origin=record.origin, messages=[make_message("user", "\n".join(lines)), make_message("assistant", LETTERS[at])]
    )


def has_options(values: dict[str, Any]) -> bool:
    return isinstance(values.get("choices"), list) or ("A" in values and "B" in values and "choices" not in values)


def _read_options(record: Record) -> list[str]:
    """Read the options from a column `choices`, or from columns A, B and so on."""
    values = record.values
    named = {letter: values[letter] for letter in LETTERS if letter in values}
    listed = values["choices"] if "choices" in values else list(named.values())
    if not isinstance(listed, list) or not 2 <= len(listed) <= len(LETTERS):
        raise cell_error(record, "choices", f"must be a list of 2 to {len(LETTERS)} options")
    if "choices" not in values and list(named) != list(LETTERS[: len(named)]):
        raise cell_error(record, "A", f"the options are {', '.join(named)}: an option in between is missing")
    for place, option in enumerate(listed):
        if option is None or not str(option).strip():
            raise cell_error(record, "choices" if "choices" in values else LETTERS[place], "an option is empty")
    return [str(option).strip() for option in listed]


def parse_prompt(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt", allow_tools=True)
    plain = are_strings(record, "prompt")
    return PromptExample(
        origin=record.origin, prompt=prompt, plain=plain, tools=tools_of(record), columns=record.values
    )


def parse_prompt_messages(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "messages", allow_tools=True)
    return PromptExample(origin=record.origin, prompt=prompt, tools=tools_of(record), columns=record.values)


def ends_with_prompt(values: dict[str, Any]) -> bool:
    messages = values["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and ROLES.get(str(last.get("role", last.get("from")))) in ("user", "tool")


def has_ground_truth(values: dict[str, Any]) -> bool:
    judge = values.get("reward_model")
    return isinstance(judge, dict) and "ground_truth" in judge


def parse_verl(record: Record, _: str) -> Example:
    columns = {"ground_truth": record.values["reward_model"]["ground_truth"], **record.values}
    return PromptExample(origin=record.origin, prompt=prompt_of(record, "prompt", allow_tools=True), columns=columns)


def prompt_from_chat(record: Record, chat: ChatExample) -> PromptExample:
    """Make a prompt of a conversation: its last completion is the ground truth (for GSM8K, the text after ####)."""
    *prompt, completion = chat.messages
    truth = completion["content"]
    if is_gsm8k(record.values):
        truth = truth.rpartition("####")[2].strip()
        if not truth:
            raise cell_error(record, "answer", 'no text after "####"')
    columns = {"ground_truth": truth, **record.values}
    return PromptExample(origin=chat.origin, prompt=prompt, plain=chat.plain, tools=chat.tools, columns=columns)


def is_gsm8k(values: dict[str, Any]) -> bool:
    return "question" in values and "####" in str(values.get("answer"))


def _alpaca_prompt(record: Record, question: str = "instruction", more: str = "input") -> list[Message]:
    messages = system_of(record)
    history = list_of(record, "history") if record.values.get("history") else []
    for index, exchange in enumerate(history):
        column = f"history[{index}]"
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise cell_error(record, column, "expected a list of [prompt, completion]")
        messages.append(make_message("user", text_of(record, column, exchange[0])))
        messages.append(make_message("assistant", filled_text(record, column, exchange[1], "completion")))
    asked = text_of(record, question, record.values[question])
    text = "\n".join(part for part in (asked, optional_text(record, more)) if part)
    if not text.strip():
        raise cell_error(record, question, "empty prompt")
    return [*messages, make_message("user", text)]


def parse_alpaca(record: Record, _: str) -> Example:
    completion = filled_text(record, "output", record.values["output"], "completion")
    return ChatExample(origin=record.origin, messages=[*_alpaca_prompt(record), make_message("assistant", completion)])


def parse_prompt_response(record: Record, _: str) -> Example:
    completion = filled_text(record, "response", record.values["response"], "completion")
    return ChatExample(
        origin=record.origin,
        messages=[*_alpaca_prompt(record, "prompt", "query"), make_message("assistant", completion)],
    )


def parse_alpaca_pair(record: Record, _: str) -> Example:
    prompt = _alpaca_prompt(record)
    chosen, rejected = completion_of(record, "chosen", prompt), completion_of(record, "rejected", prompt)
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record))


def parse_alpaca_output_pair(record: Record, _: str) -> Example:
    output = list_of(record, "output")
    if len(output) != 2:
        raise cell_error(record, "output", f"expected [chosen, rejected], found a list of {len(output)}")
    chosen, rejected = (
        [make_message("assistant", filled_text(record, "output", text, "completion"))] for text in output
    )
    prompt = _alpaca_prompt(record)
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record))


def parse_pair(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt")
    chosen, rejected = completion_of(record, "chosen", prompt), completion_of(record, "rejected", prompt)
    plain = are_strings(record, "prompt", "chosen", "rejected")
    return PairExample(
        origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record), plain=plain
    )


def parse_sharegpt_pair(record: Record, _: str) -> Example:
    prompt = system_of(record) + prompt_of(record, "conversations")
    chosen, rejected = completion_of(record, "chosen", prompt), completion_of(record, "rejected", prompt)
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record))


def parse_hh_pair(record: Record, _: str) -> Example:
    chosen, rejected = _dialogue(record, "chosen"), _dialogue(record, "rejected")
    prompt = chosen[:-1]
    if prompt != rejected[:-1]:
        raise cell_error(record, "rejected", "does not begin with the same prompt as chosen")
    return PairExample(
        origin=record.origin, prompt=prompt, chosen=chosen[-1:], rejected=rejected[-1:], margin=margin_of(record)
    )


def _dialogue(record: Record, column: str) -> list[Message]:
    """Read the turns of a text with Human: and Assistant:; a repeated marker continues the turn.

    An empty last completion is kept: in these files annotators sometimes preferred it.
    """
    if isinstance(value_of(record, column), list):
        messages = messages_of(record, column)
        check_assistant_messages(record, column, messages, first=len(messages) - 1)
    else:
        before, *parts = HH_TURN.split(text_of(record, column, record.values[column]))
        if before.strip() or not parts:
            raise cell_error(record, column, r'expected "\n\nHuman: ...\n\nAssistant: ...", or a column prompt as well')
        messages = []
        for name, text in zip(parts[0::2], parts[1::2], strict=True):
            role = ROLES[name.lower()]
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] = f"{messages[-1]['content']}\n\n{text.strip()}".strip()
            else:
                messages.append(make_message(role, text.strip()))
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise cell_error(record, column, "expected a prompt followed by a completion of the assistant")
    return messages


def parse_labelled_chat(record: Record, _: str) -> Example:
    messages = messages_of(record, "messages")
    check_assistant_messages(record, "messages", messages, first=len(messages) - 1)
    if len(messages) < 2:
        raise cell_error(record, "messages", "expected a prompt before the assistant's message")
    label = label_of(record, "label", record.values["label"])
    return LabelledExample(origin=record.origin, prompt=messages[:-1], completion=messages[-1:], label=label)


def parse_labelled_completion(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt")
    completion, label = completion_of(record, "completion", prompt), label_of(record, "label", record.values["label"])
    plain = are_strings(record, "prompt", "completion")
    return LabelledExample(origin=record.origin, prompt=prompt, completion=completion, label=label, plain=plain)


def _step_texts(record: Record, column: str, placeholder: str) -> list[str]:
    steps = [filled_text(record, f"{column}[{i}]", step, "step") for i, step in enumerate(list_of(record, column))]
    for index, step in enumerate(steps):
        if placeholder in step:
            raise cell_error(record, f"{column}[{index}]", f"the step contains the placeholder {placeholder!r} itself")
    return steps


def _step_labels(record: Record, column: str, steps: int, what: str) -> list[float]:
    labels = [label_of(record, f"{column}[{i}]", value, soft=True) for i, value in enumerate(list_of(record, column))]
    if len(labels) != steps:
        raise cell_error(record, column, f"{len(labels)} labels for {steps} {what}")
    return labels


def parse_stepwise(record: Record, placeholder: str) -> Example:
    steps = _step_texts(record, "completions", placeholder)
    labels = _step_labels(record, "labels", len(steps), "completions")
    plain = are_strings(record, "prompt")
    return StepwiseExample(
        origin=record.origin, prompt=prompt_of(record, "prompt"), steps=steps, labels=labels, plain=plain
    )


def parse_processbench(record: Record, placeholder: str) -> Example:
    """`label` is the index of the first incorrect step, -1 if there is none; steps after it have no label."""
    problem = filled_text(record, "problem", record.values["problem"], "prompt")
    steps = _step_texts(record, "steps", placeholder)
    label = number_of(record, "label")
    if label not in range(-1, len(steps)):
        raise cell_error(record, "label", f"expected -1 or the index of one of the {len(steps)} steps, found {label:g}")
    wrong = int(label)
    labels = [1.0] * len(steps) if wrong < 0 else [1.0] * wrong + [0.0]
    # The solutions were split into steps at blank lines; these are restored.
    texts = [steps[0], *(f"\n\n{step}" for step in steps[1:])][: len(labels)]
    return StepwiseExample(
        origin=record.origin, prompt=[make_message("user", problem)], steps=texts, labels=labels, plain=True
    )


def marked_steps_parser(column: str) -> Callable[[Record, str], Example]:
    """Return a parser of text with a placeholder after each step; text after the last placeholder is left out."""

    def parse(record: Record, placeholder: str) -> Example:
        *steps, _ = text_of(record, "input", record.values["input"]).split(placeholder)
        if not steps:
            raise cell_error(record, "input", f"the placeholder {placeholder!r} does not occur")
        if not all(step.strip() for step in steps):
            raise cell_error(record, "input", f"empty step before a placeholder {placeholder!r}")
        labels = _step_labels(record, column, len(steps), f"placeholders {placeholder!r}")
        return StepwiseExample(origin=record.origin, prompt=[], steps=steps, labels=labels, plain=True)

    return parse
