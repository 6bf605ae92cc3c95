"""Parse conversations and prompts of public data sets whose records are not in one of the common formats."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from posttrain.data.ground_truth import last_boxed
from posttrain.data.reading.cells import (
    QUARANTINE,
    ROLES,
    cell_error,
    check_assistant_messages,
    check_same_prompt,
    filled_text,
    list_of,
    make_message,
    messages_of,
    nested_value,
    number_as_text,
    object_of,
    optional_text,
    parse_json,
    prompt_of,
    system_of,
    text_of,
    tool_calls_of,
    tools_of,
    value_of,
    with_system,
)
from posttrain.data.reading.examples import ChatExample, Example, Message, PromptExample, SegmentsExample
from posttrain.data.reading.parsers import LETTERS, has_options
from posttrain.data.reading.records import Record

GLAIVE_TURN = re.compile(r"(?:\A|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
GLAIVE_CALL = re.compile(r"<functioncall>\s*(\{.*\})", re.DOTALL)
GLAIVE_QUOTED = re.compile(r"""\{\s*"name":\s*"([^"]+)",\s*"arguments":\s*'(.*)'\s*\}""", re.DOTALL)
GUANACO_TURN = re.compile(r"### (Human|Assistant):")


# A question, its completion and its ground truth


def question_parser(question: str, completion: str, *before: str) -> Callable[[Record, str], Example]:
    """Return a parser of a question and its completion, each a column or a path into one.

    `before`: columns with text that comes before the question, on lines of its own. A completion may be empty here:
    for reinforcement learning the ground truth suffices, and `SourceFormat` refuses it for other verbs.
    """

    def parse(record: Record, _: str) -> Example:
        texts = [optional_text(record, column) for column in before]
        value = nested_value(record, question)
        if any(texts):
            texts.append(filled_text(record, question, value, "prompt"))
            prompt = [*system_of(record), make_message("user", "\n".join(text for text in texts if text))]
        elif question in record.values:
            prompt = prompt_of(record, question)
        else:
            prompt = [*system_of(record), make_message("user", filled_text(record, question, value, "prompt"))]
        found = record.values.get(completion, "") if completion in record.values else nested_value(record, completion)
        text = text_of(record, completion, number_as_text("" if found is None else found))
        return ChatExample(origin=record.origin, messages=[*prompt, make_message("assistant", text)])

    return parse


def reasoning_parser(question: str, reasoning: str, completion: str) -> Callable[[Record, str], Example]:
    """Return a parser of a question, the reasoning and the completion; one that was found to be wrong is refused."""

    def parse(record: Record, _: str) -> Example:
        if record.values.get("verifier_score") == 0:
            raise cell_error(record, "verifier_score", f"is 0: a wrong completion is not trained on; {QUARANTINE}")
        text = filled_text(record, completion, record.values[completion], "completion")
        thought = optional_text(record, reasoning)
        message = make_message("assistant", text) | ({"reasoning_content": thought} if thought.strip() else {})
        return ChatExample(origin=record.origin, messages=[*prompt_of(record, question), message])

    return parse


def boxed_answer(record: Record) -> Any:
    r"""Return what the last \boxed{} of a solution contains (MATH), or the solution if it has none."""
    solution = text_of(record, "solution", number_as_text(value_of(record, "solution")))
    return last_boxed(solution) or filled_text(record, "solution", solution, "ground truth")


def truth_at(path: str) -> Callable[[Record], Any]:
    """Return a function that reads the ground truth from a column or a path into one."""
    return lambda record: number_as_text(nested_value(record, path))


def parse_svamp(record: Record, _: str) -> Example:
    """Join the story and the question with a space, as in SVAMP's own `question_concat`."""
    story, question = (filled_text(record, name, record.values[name], "prompt") for name in ("Body", "Question"))
    answer = text_of(record, "Answer", number_as_text(value_of(record, "Answer")))
    messages = [make_message("user", f"{story.strip()} {question.strip()}"), make_message("assistant", answer)]
    return ChatExample(origin=record.origin, messages=messages)


def parse_squad(record: Record, _: str) -> Example:
    """Write the context, a blank line and the question; the completion is the first of the answers."""
    context, question = (filled_text(record, name, record.values[name], "prompt") for name in ("context", "question"))
    if not nested_value(record, "answers.text"):
        raise cell_error(record, "answers.text", f"is empty: the question has no answer in the context; {QUARANTINE}")
    answer = filled_text(record, "answers.text", nested_value(record, "answers.text.0"), "completion")
    messages = [make_message("user", f"{context}\n\n{question}"), make_message("assistant", answer)]
    return ChatExample(origin=record.origin, messages=messages)


def has_squad_answers(values: dict[str, Any]) -> bool:
    answers = values["answers"]
    return isinstance(answers, dict) and "text" in answers


def arc_parser(question: str) -> Callable[[Record, str], Example]:
    """Return a parser of questions with choices {text, label} and the label of the correct one (ARC)."""

    def parse(record: Record, _: str) -> Example:
        stem = filled_text(record, question, record.values[question], "question")
        texts, labels = nested_value(record, "choices.text"), nested_value(record, "choices.label")
        if not is_texts(texts) or not is_texts(labels):
            raise cell_error(record, "choices", "expected lists of texts and of labels")
        key = text_of(record, "answerKey", record.values["answerKey"])
        if key not in labels or len(texts) != len(labels) or len(texts) > len(LETTERS):
            raise cell_error(record, "answerKey", f"is {key!r}; the choices have the labels {', '.join(labels)}")
        lines = [stem, *(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))]
        messages = [make_message("user", "\n".join(lines)), make_message("assistant", LETTERS[labels.index(key)])]
        return ChatExample(origin=record.origin, messages=messages)

    return parse


def parse_aqua(record: Record, _: str) -> Example:
    """Write the question and its options, one per line; the completion is the rationale."""
    question = filled_text(record, "question", record.values["question"], "question")
    lines = [question, *(text_of(record, "options", option) for option in list_of(record, "options"))]
    rationale = filled_text(record, "rationale", record.values["rationale"], "completion")
    messages = [make_message("user", "\n".join(lines)), make_message("assistant", rationale)]
    return ChatExample(origin=record.origin, messages=messages)


def openmath_parser(question: str) -> Callable[[Record, str], Example]:
    """Return a parser of a generated solution; one that is marked as wrong is refused: it would be imitated."""

    def parse(record: Record, _: str) -> Example:
        if record.values.get("is_correct") is False:
            raise cell_error(record, "is_correct", f"is false: a wrong solution is not trained on; {QUARANTINE}")
        return question_parser(question, "generated_solution")(record, "")

    return parse


def parse_s1k(record: Record, _: str) -> Example:
    """Read the first reasoning trace as the reasoning of the assistant's message, and the attempt as its content."""
    prompt = prompt_of(record, "question")
    traces = record.values["thinking_trajectories"]
    trace = nested_value(record, "thinking_trajectories.0") if isinstance(traces, list) else traces
    message = make_message("assistant", filled_text(record, "attempt", record.values["attempt"], "completion"))
    message["reasoning_content"] = filled_text(record, "thinking_trajectories", trace, "reasoning")
    return ChatExample(origin=record.origin, messages=[*prompt, message])


def refusal(column: str, reason: str) -> Callable[[Record, str], Example]:
    """Return a parser that refuses all records: the family is known, and why it cannot be read as it is."""

    def parse(record: Record, _: str) -> Example:
        raise cell_error(record, column, reason)

    return parse


# Prompts


def parse_orz(record: Record, _: str) -> Example:
    """Read a list of two turns: the user's, and the assistant's with the ground truth in place of its text."""
    prompt = filled_text(record, "0.value", nested_value(record, "0.value"), "prompt")
    columns = {"ground_truth": truth_at("1.ground_truth.value")(record), **record.values}
    return PromptExample(origin=record.origin, prompt=[make_message("user", prompt)], plain=True, columns=columns)


def parse_question_prompt(record: Record, _: str) -> Example:
    """Read a question with a ground truth, without a completion."""
    column = next(name for name in ("question", "problem") if name in record.values)
    prompt = prompt_of(record, column)
    return PromptExample(origin=record.origin, prompt=prompt, columns=record.values)


def parse_verification_info(record: Record, _: str) -> Example:
    """Read a prompt of SYNTHETIC-1; the ground truth is in the JSON text of `verification_info`."""
    info = record.values["verification_info"]
    try:
        known = json.loads(info) if isinstance(info, str) else info
    except (ValueError, RecursionError):
        known = None
    if known is None and isinstance(info, str):  # its first release wrote Python's {'ground_truth': '72'}
        quoted = re.fullmatch(r"""\s*\{'ground_truth': (['"])(.*)\1\}\s*""", info, re.DOTALL)
        if quoted is None:
            raise cell_error(record, "verification_info", f"is not JSON; {QUARANTINE}")
        known = {"ground_truth": quoted[2].replace("\\\\", "\\")}
    if not isinstance(known, dict):
        raise cell_error(record, "verification_info", "expected an object")
    columns = {"ground_truth": known.get("ground_truth", known), **record.values}
    return PromptExample(origin=record.origin, prompt=prompt_of(record, "prompt"), columns=columns)


def parse_verified_response(record: Record, _: str) -> Example:
    """Read a generated completion of SYNTHETIC-1; one with score 0 failed its verification and is refused."""
    if record.values.get("score") == 0:
        raise cell_error(record, "score", f"is 0: the completion failed its verification; {QUARANTINE}")
    return question_parser("prompt", "llm_response")(record, "")


# Conversations


def alternating_parser(column: str) -> Callable[[Record, str], Example]:
    """Return a parser of a list of texts, the user's and the assistant's by turns (LIMA, UltraChat)."""

    def parse(record: Record, _: str) -> Example:
        texts = [filled_text(record, f"{column}[{i}]", text, "turn") for i, text in enumerate(list_of(record, column))]
        if len(texts) % 2:
            reason = f"{len(texts)} turns: the last one is the user's and has no completion; {QUARANTINE}"
            raise cell_error(record, column, reason)
        turns = [make_message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]
        check_same_prompt(record, column, turns)
        return ChatExample(origin=record.origin, messages=with_system(record, column, turns))

    return parse


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def has_answers(column: str) -> Callable[[dict[str, Any]], bool]:
    """Return a condition: the column is a list of answers, each of them right, and the question has no options."""
    return lambda values: is_texts(values[column]) and not has_options(values)


def parse_exchanges(record: Record, _: str) -> Example:
    """Read a list of exchanges {input, output} (Capybara) or {human, assistant}."""
    messages: list[Message] = []
    for index, exchange in enumerate(list_of(record, "conversation")):
        exchange = object_of(record, f"conversation[{index}]", exchange)
        names = ("input", "output") if "input" in exchange else ("human", "assistant")
        for role, name in zip(("user", "assistant"), names, strict=True):
            where = f"conversation[{index}].{name}"
            messages.append(make_message(role, filled_text(record, where, exchange.get(name), "turn")))
    check_same_prompt(record, "conversation", messages)
    return ChatExample(origin=record.origin, messages=with_system(record, "conversation", messages))


def has_exchanges(values: dict[str, Any]) -> bool:
    turns = values["conversation"]
    first = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(first, dict) and ({"input", "output"} <= first.keys() or {"human", "assistant"} <= first.keys())


def parse_logged_conversation(record: Record, _: str) -> Example:
    """Read messages in the column `conversation` (WildChat, LMSYS-Chat)."""
    messages = messages_of(record, "conversation")
    check_assistant_messages(record, "conversation", messages)
    check_same_prompt(record, "conversation", messages)
    return ChatExample(origin=record.origin, messages=with_system(record, "conversation", messages))


def parse_guanaco(record: Record, _: str) -> Example:
    """Split a text at `### Human:` and `### Assistant:`; a last turn of the user, without a completion, is left out."""
    _, *parts = GUANACO_TURN.split(record.values["text"])
    turns = [
        make_message(ROLES[name.lower()], text.strip()) for name, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns[-1]["role"] == "user":
        turns.pop()
    if not turns:
        raise cell_error(record, "text", f"the text has no turn of the assistant; {QUARANTINE}")
    check_assistant_messages(record, "text", turns)
    return ChatExample(origin=record.origin, messages=turns)


def is_guanaco(values: dict[str, Any]) -> bool:
    return isinstance(values["text"], str) and values["text"].lstrip().startswith("### Human:")


def parse_xlam(record: Record, _: str) -> Example:
    """Read a query, the definitions of tools and the calls that answer it, the last two as JSON text."""
    query = filled_text(record, "query", record.values["query"], "prompt")
    calls = tool_calls_of(record, "answers", parse_json(record, "answers", value_of(record, "answers")))
    if not calls:
        raise cell_error(record, "answers", f"no tool is called; {QUARANTINE}")
    tools = [_tool_definition(tool) for tool in tools_of(record) or []]
    messages = [*system_of(record), make_message("user", query), {**make_message("assistant", ""), "tool_calls": calls}]
    return ChatExample(origin=record.origin, messages=messages, tools=tools or None)


def _tool_definition(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a definition in the form that chat templates expect: a function with a JSON schema of its parameters."""
    if "function" in tool:
        return tool
    given = tool.get("parameters")
    parameters = given if isinstance(given, dict) else {}
    if parameters.get("type") != "object" or "properties" not in parameters:
        parameters = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {**tool, "parameters": parameters}}


def parse_glaive(record: Record, _: str) -> Example:
    """Read turns and `<functioncall>` from the text `chat`, and definitions of functions from the text `system`."""
    introduction, _, rest = optional_text(record, "system").removeprefix("SYSTEM:").strip().partition("{")
    tools = _json_objects(record, "system", "{" + rest) if rest else []
    messages = [make_message("system", introduction.strip())] if introduction.strip() and not tools else []
    _, *parts = GLAIVE_TURN.split(text_of(record, "chat", record.values["chat"]))
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        message = make_message(GLAIVE_ROLES[name], text.replace("<|endoftext|>", "").strip())
        if name == "ASSISTANT" and (call := GLAIVE_CALL.search(message["content"])):
            message["tool_calls"] = tool_calls_of(record, "chat", [_glaive_call(record, call[1])])
            message["content"] = message["content"][: call.start()].strip()
        messages.append(message)
    if not parts:
        raise cell_error(record, "chat", "expected turns that begin with USER: and ASSISTANT:")
    check_assistant_messages(record, "chat", messages)
    return ChatExample(
        origin=record.origin, messages=messages, tools=[_tool_definition(tool) for tool in tools] or None
    )


def _glaive_call(record: Record, text: str) -> dict[str, Any]:
    """Read a call; its arguments are JSON in single quotes, so that the whole is not JSON."""
    if quoted := GLAIVE_QUOTED.match(text):
        return {"name": quoted[1], "arguments": parse_json(record, "chat", quoted[2].replace("\\'", "'"))}
    found = parse_json(record, "chat", text)
    return found if isinstance(found, dict) else {}


def _json_objects(record: Record, column: str, text: str) -> list[dict[str, Any]]:
    """Read JSON objects that follow each other."""
    found: list[dict[str, Any]] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text.rstrip()):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise cell_error(record, column, f"the functions cannot be read as JSON: {error}") from None
        found.append(object_of(record, column, value))
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
    return found


def parse_oasst_tree(record: Record, _: str) -> Example:
    """Follow the best-ranked reply at every message, up to the assistant's last one."""
    node = record.values["prompt"]
    messages: list[Message] = []
    while node:
        messages.append(oasst_message(record, node))
        node = next(iter(ranked_replies(node)), None)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise cell_error(record, "prompt", f"no message of the tree is the assistant's; {QUARANTINE}")
    return ChatExample(origin=record.origin, messages=messages)


def oasst_message(record: Record, node: Any) -> Message:
    """Return a node of a tree as a message."""
    node = object_of(record, "prompt", node)
    role = ROLES.get(str(node.get("role")))
    if role not in ("user", "assistant"):
        raise cell_error(record, "prompt", f"a message of the tree has the role {node.get('role')!r}")
    return make_message(role, filled_text(record, "prompt.text", node.get("text"), "message"))


def ranked_replies(node: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the replies that were not deleted, the best rank (0) first; those without a rank come last."""
    listed = node.get("replies")
    replies = [reply for reply in listed if isinstance(reply, dict)] if isinstance(listed, list) else []
    replies = [reply for reply in replies if not reply.get("deleted")]
    return sorted(replies, key=lambda reply: rank_of(reply, math.inf))


def rank_of(reply: dict[str, Any], default: float) -> float:
    """Return the rank of a reply, 0 for the best; `default` if it has none."""
    rank = reply.get("rank")
    return rank if isinstance(rank, int | float) and math.isfinite(rank) else default


def is_tree(values: dict[str, Any]) -> bool:
    return isinstance(values["prompt"], dict) and "replies" in values["prompt"]


def parse_segments(record: Record, _: str) -> Example:
    """Read segments of text with `label`, true if they are trained on (axolotl's input_output)."""
    segments: list[tuple[str, bool]] = []
    for index, segment in enumerate(list_of(record, "segments")):
        where = f"segments[{index}]"
        if not isinstance(segment, dict) or not isinstance(segment.get("label"), bool):
            raise cell_error(record, where, "expected text and label, which is true or false")
        if text := text_of(record, f"{where}.text", segment.get("text")):
            segments.append((text, segment["label"]))
    if not any(trained for _, trained in segments):
        raise cell_error(record, "segments", "no segment is to be trained on")
    return SegmentsExample(origin=record.origin, segments=segments)
