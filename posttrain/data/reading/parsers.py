"""Parse the records of each data format into examples."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from posttrain.data.ground_truth import ground_truth_of
from posttrain.data.reading.cells import (
    CONTEXT_COLUMNS,
    QUARANTINE,
    ROLES,
    cell_error,
    check_assistant_messages,
    check_same_prompt,
    completion_of,
    dialogue_of,
    filled_text,
    is_plain,
    label_of,
    list_of,
    make_message,
    margin_of,
    messages_of,
    number_as_text,
    number_of,
    optional_text,
    prompt_of,
    prompt_turns,
    system_of,
    text_of,
    tools_of,
    value_of,
    with_system,
    without_train_key,
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

NO_ANSWER = ("proof", "notfound", "")  # what NuminaMath-1.5 writes where a problem has no answer that can be compared
LETTERS = "ABCDEFGHIJ"  # names of the options of a multiple-choice question
NO_INPUT = "<noinput>"  # what Self-Instruct writes for an instruction without an input
ROLE_NAME = re.compile(r"(?i)\s*(assistant|gpt|bot)\s*:")
OPTION_COLUMNS = ("choices", "options")  # of a multiple-choice question


def parse_text(record: Record, _: str) -> Example:
    return TextExample(origin=record.origin, text=filled_text(record, "text", record.values["text"], "text"))


def parse_chat(record: Record, _: str) -> Example:
    return _conversation(record, "messages")


def parse_sharegpt(record: Record, _: str) -> Example:
    return _conversation(record, "conversations")


def _conversation(record: Record, column: str) -> ChatExample:
    messages = messages_of(record, column, allow_tools=True)
    check_assistant_messages(record, column, messages)
    check_same_prompt(record, column, messages)
    if messages[0]["role"] == "assistant":
        first = "the first message is the assistant's: no prompt comes before it"
        raise cell_error(record, f"{column}[0]", f"{first}; {QUARANTINE}")
    if all("train" in message for message in messages if message["role"] == "assistant"):
        raise cell_error(record, column, "no message of the assistant is to be trained on")
    messages = with_system(record, column, messages)
    return ChatExample(origin=record.origin, messages=messages, tools=tools_of(record))


def parse_prompt_completion(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt")
    messages = prompt + completion_of(record, "completion", prompt)
    return ChatExample(origin=record.origin, messages=messages, plain=is_plain(record, prompt, "prompt", "completion"))


def parse_question_answer(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "question")
    completion = filled_text(record, "answer", number_as_text(record.values["answer"]), "completion")
    return ChatExample(origin=record.origin, messages=[*prompt, make_message("assistant", completion)])


def asks_about(column: str) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: the column has a text, and the question about it has one short answer and no options."""

    def condition(values: dict[str, Any]) -> bool:
        text, answer = values[column], values["answer"]
        filled = isinstance(text, str) and bool(text.strip())
        return filled and isinstance(number_as_text(answer), str) and not has_options(values)

    return condition


def context_parser(column: str) -> Callable[[Record, str], Example]:
    """Return a parser of a question about a text: the text, a blank line and the question are the prompt."""

    def parse(record: Record, _: str) -> Example:
        context, question, completion = (
            filled_text(record, name, number_as_text(record.values[name]), what)
            for name, what in ((column, "prompt"), ("question", "prompt"), ("answer", "completion"))
        )
        messages = [make_message("user", f"{context}\n\n{question}"), make_message("assistant", completion)]
        return ChatExample(origin=record.origin, messages=with_system(record, column, messages))

    return parse


def solution_parser(question: str) -> Callable[[Record, str], Example]:
    """Return a parser of a question, a solution and an answer.

    The longer one of `solution` and `answer` is the completion: the other is the result that it arrives at. If one of
    them is empty there is no completion, which reinforcement learning does not need.
    """

    def parse(record: Record, _: str) -> Example:
        prompt = prompt_of(record, question)
        texts = [
            text_of(record, column, number_as_text(record.values[column] or "")) for column in ("solution", "answer")
        ]
        completion = max(texts, key=lambda text: len(text.strip())) if all(text.strip() for text in texts) else ""
        return ChatExample(origin=record.origin, messages=[*prompt, make_message("assistant", completion)])

    return parse


def short_truth(record: Record) -> Any:
    """Return the shorter one of `answer` and `solution`; DataError if it says that there is no answer."""
    values = {name: number_as_text(record.values.get(name)) for name in ("answer", "solution")}
    truth = ground_truth_of(values)
    if isinstance(truth, str) and truth.strip().lower() in NO_ANSWER:
        raise cell_error(record, "answer", f"is {truth!r}: no completion can be compared with it; {QUARANTINE}")
    return truth


def parse_multiple_choice(record: Record, _: str) -> Example:
    """Write the question and its options, one per line; the completion is the letter of the correct one."""
    column = "question" if "question" in record.values else "Question"
    question = filled_text(record, column, record.values[column], "question")
    options = _read_options(record)
    wanted = record.values["answer" if "answer" in record.values else "Answer"]
    letters, text = LETTERS[: len(options)], str(wanted).strip()
    named = [wanted] if isinstance(wanted, int) else [i for i, letter in enumerate(letters) if letter == text.upper()]
    quoted = [i for i, option in enumerate(options) if option == text]
    index = next(iter(named + quoted), -1)
    if isinstance(wanted, bool) or not 0 <= index < len(options):
        allowed = f"{', '.join(letters)}, the index of an option from 0, or its text"
        raise cell_error(record, "answer", f"is {wanted!r}; it must be one of {allowed}")
    about = [record.values[name] for name in CONTEXT_COLUMNS if isinstance(record.values.get(name), str)]
    question = "\n\n".join([*(passage for passage in about if passage.strip()), question])
    lines = [question, *(f"{name}. {text}" for name, text in zip(LETTERS, options, strict=False))]
    return ChatExample(
        origin=record.origin,
        messages=[make_message("user", "\n".join(lines)), make_message("assistant", LETTERS[index])],
    )


def has_options(values: dict[str, Any]) -> bool:
    """Whether a question has options: a list, an object, or columns A, B and so on."""
    if any(isinstance(values.get(name), list) or _is_lettered(values.get(name)) for name in OPTION_COLUMNS):
        return True
    return "A" in values and "B" in values and "choices" not in values


def _is_lettered(value: Any) -> bool:
    """Whether a value is {"A": ..., "B": ...}, as MedQA has its options."""
    return isinstance(value, dict) and {"A", "B"} <= set(value)


def _read_options(record: Record) -> list[str]:
    """Read the options from a column `choices` or `options`, or from columns A, B and so on."""
    column = next((name for name in OPTION_COLUMNS if name in record.values), "")
    lettered = record.values.get(column) if column else record.values
    named = {letter: lettered[letter] for letter in LETTERS if letter in lettered} if isinstance(lettered, dict) else {}
    listed = list(named.values()) if named else lettered
    if not isinstance(listed, list) or not 2 <= len(listed) <= len(LETTERS):
        raise cell_error(record, column or "A", f"must be a list of 2 to {len(LETTERS)} options")
    if named and list(named) != list(LETTERS[: len(named)]):
        raise cell_error(record, column or "A", f"the options are {', '.join(named)}: an option in between is missing")
    for index, option in enumerate(listed):
        if option is None or not str(option).strip():
            raise cell_error(record, column or LETTERS[index], "an option is empty")
    return [str(option).strip() for option in listed]


def parse_prompt(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt", allow_tools=True)
    plain = is_plain(record, prompt, "prompt")
    return PromptExample(
        origin=record.origin, prompt=prompt, plain=plain, tools=tools_of(record), columns=record.values
    )


def parse_prompt_messages(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "messages", allow_tools=True)
    check_same_prompt(record, "messages", prompt)
    return PromptExample(origin=record.origin, prompt=prompt, tools=tools_of(record), columns=record.values)


def ends_with_prompt(values: dict[str, Any]) -> bool:
    messages = values["messages"]
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError):
            return False
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, dict) and ROLES.get(str(last.get("role", last.get("from")))) in ("user", "tool")


def has_ground_truth(values: dict[str, Any]) -> bool:
    reward_model = values.get("reward_model")
    return isinstance(reward_model, dict) and "ground_truth" in reward_model


def parse_verl(record: Record, _: str) -> Example:
    columns = {"ground_truth": record.values["reward_model"]["ground_truth"], **record.values}
    return PromptExample(origin=record.origin, prompt=prompt_of(record, "prompt", allow_tools=True), columns=columns)


def parse_labelled_prompt(record: Record, _: str) -> Example:
    """Read messages whose `label` is their ground truth, as slime's files have them."""
    columns = {"ground_truth": number_as_text(record.values["label"]), **record.values}
    prompt = prompt_of(record, "prompt", allow_tools=True)
    return PromptExample(origin=record.origin, prompt=prompt, tools=tools_of(record), columns=columns)


def parse_context_messages(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "context_messages", allow_tools=True)
    return PromptExample(origin=record.origin, prompt=prompt, tools=tools_of(record), columns=record.values)


def prompt_from_chat(record: Record, chat: ChatExample, known: Any) -> PromptExample:
    """Make a prompt of a conversation without its last completion.

    `known`: the ground truth, if the record has one apart from the completion; else it is the completion (for GSM8K,
    the text after ####).
    """
    *prompt, completion = chat.messages
    truth = completion["content"] if known is None else known
    if is_gsm8k(record.values):
        truth = completion["content"].rpartition("####")[2].strip()
        if not truth:
            raise cell_error(record, "answer", 'no text after "####"')
    columns = {"ground_truth": truth, **record.values}
    prompt = without_train_key(prompt)
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
    parts = [text_of(record, question, record.values[question]), optional_text(record, more)]
    text = "\n".join(part for part in parts if part and part.strip() != NO_INPUT)
    if not text.strip():
        raise cell_error(record, question, "empty prompt")
    turns = prompt_turns(text)
    if turns[-1]["role"] == "assistant":
        raise cell_error(record, question, "the last message of a prompt must not be the assistant's")
    return [*messages, *turns]


def parse_alpaca(record: Record, _: str) -> Example:
    completion = filled_text(record, "output", record.values["output"], "completion")
    return ChatExample(origin=record.origin, messages=[*_alpaca_prompt(record), make_message("assistant", completion)])


def parse_prompt_response(record: Record, _: str) -> Example:
    completion = filled_text(record, "response", record.values["response"], "completion")
    return ChatExample(
        origin=record.origin,
        messages=[*_alpaca_prompt(record, "prompt", "query"), make_message("assistant", completion)],
    )


def parse_query_response(record: Record, _: str) -> Example:
    completion = filled_text(record, "response", record.values["response"], "completion")
    prompt = _alpaca_prompt(record, "query", "")
    return ChatExample(origin=record.origin, messages=[*prompt, make_message("assistant", completion)])


def parse_query_pair(record: Record, _: str) -> Example:
    prompt = _alpaca_prompt(record, "query", "")
    chosen, rejected = (completion_of(record, column, prompt) for column in ("response", "rejected_response"))
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record))


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
    return _pair(record, "prompt")


def parse_question_pair(record: Record, _: str) -> Example:
    return _pair(record, "question")


def _pair(record: Record, column: str) -> PairExample:
    if all(ROLE_NAME.match(str(record.values[name])) for name in ("chosen", "rejected")):
        reason = (
            "begins with the name of a role, which would be trained on; remove the names with a data.map_keys function"
        )
        raise cell_error(record, "chosen", f'{reason}, {{"function": "FILE.py:FUNCTION"}}')
    prompt = prompt_of(record, column)
    chosen, rejected = completion_of(record, "chosen", prompt), completion_of(record, "rejected", prompt)
    plain = is_plain(record, prompt, column, "chosen", "rejected")
    return PairExample(
        origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record), plain=plain
    )


def parse_sharegpt_pair(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "conversations")
    check_same_prompt(record, "conversations", prompt)
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
    """Read the messages, or the turns of a text with Human: and Assistant:.

    An empty last completion is kept: in these files annotators sometimes preferred it.
    """
    if isinstance(value_of(record, column), list):
        messages = messages_of(record, column)
        check_assistant_messages(record, column, messages, first=len(messages) - 1)
    else:
        messages = dialogue_of(text_of(record, column, record.values[column]))
        if not messages:
            raise cell_error(record, column, r'expected "\n\nHuman: ...\n\nAssistant: ...", or a column prompt as well')
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise cell_error(record, column, "expected a prompt followed by a completion of the assistant")
    return messages


def labelled_chat_parser(column: str) -> Callable[[Record, str], Example]:
    """Return a parser of a conversation whose last message is labelled."""

    def parse(record: Record, _: str) -> Example:
        messages = without_train_key(messages_of(record, column))
        check_assistant_messages(record, column, messages, first=len(messages) - 1)
        check_same_prompt(record, column, messages)
        if len(messages) < 2:
            raise cell_error(record, column, "expected a prompt before the assistant's message")
        label = label_of(record, "label", record.values["label"])
        return LabelledExample(origin=record.origin, prompt=messages[:-1], completion=messages[-1:], label=label)

    return parse


def parse_labelled_completion(record: Record, _: str) -> Example:
    prompt = prompt_of(record, "prompt")
    completion, label = completion_of(record, "completion", prompt), label_of(record, "label", record.values["label"])
    plain = is_plain(record, prompt, "prompt", "completion")
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
    prompt = prompt_of(record, "prompt")
    plain = is_plain(record, prompt, "prompt")
    return StepwiseExample(origin=record.origin, prompt=prompt, steps=steps, labels=labels, plain=plain)


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
