"""Parse pairs, labelled completions and labelled steps of public data sets that have formats of their own.

A record in which no completion is preferred is refused: which of them is better is not guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from posttrain.core.errors import DataError
from posttrain.data.reading.cells import (
    QUARANTINE,
    cell_error,
    check_assistant_messages,
    completion_of,
    filled_text,
    label_of,
    list_of,
    make_message,
    margin_of,
    messages_of,
    nested_value,
    number_of,
    object_of,
    optional_text,
    prompt_of,
    text_of,
    value_of,
    without_train_key,
)
from posttrain.data.reading.examples import Example, LabelledExample, Message, PairExample, StepwiseExample
from posttrain.data.reading.public_chats import oasst_message, rank_of, ranked_replies
from posttrain.data.reading.records import Record

SHEPHERD_MARK = "ки"
SHEPHERD_STEP = re.compile(r"\s*(?=Step 1:)")


def tie(record: Record, column: str) -> DataError:
    """Return the error for a record in which no completion is preferred."""
    return cell_error(record, column, f"is {record.values.get(column)!r}: no completion is preferred; {QUARANTINE}")


def _completion(record: Record, column: str, value: Any) -> list[Message]:
    return [make_message("assistant", filled_text(record, column, value, "completion"))]


def _pair(
    record: Record, prompt: list[Message], columns: tuple[str, str], first_is_better: bool, margin: float | None = None
) -> PairExample:
    """Return the pair of two columns or paths."""
    first, second = (_completion(record, column, nested_value(record, column)) for column in columns)
    chosen, rejected = (first, second) if first_is_better else (second, first)
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)


def pair_parser(prompt: str, chosen: str, rejected: str) -> Callable[[Record, str], Example]:
    """Return a parser of a prompt, its preferred and its rejected completion, each in a column."""

    def parse(record: Record, _: str) -> Example:
        if record.values.get("status") == "tie":  # distilabel
            raise tie(record, "status")
        messages = prompt_of(record, prompt)
        better, worse = (completion_of(record, column, messages) for column in (chosen, rejected))
        margin = margin_of(record)
        return PairExample(origin=record.origin, prompt=messages, chosen=better, rejected=worse, margin=margin)

    return parse


def parse_step_dpo(record: Record, _: str) -> Example:
    """Read two continuations of the same first steps (Step-DPO); the steps cancel out of the difference of both."""
    prompt, begun = prompt_of(record, "prompt"), optional_text(record, "initial_reason_steps")
    texts = [filled_text(record, name, record.values[name], "completion") for name in ("chosen", "rejected")]
    chosen, rejected = ([make_message("assistant", begun + text)] for text in texts)
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record))


def parse_pku(record: Record, _: str) -> Example:
    """Read the preferred one of `response_0` and `response_1` from the column `better_response_id`."""
    better = value_of(record, "better_response_id")
    if better not in (0, 1):
        raise tie(record, "better_response_id")
    return _pair(record, prompt_of(record, "prompt"), ("response_0", "response_1"), better == 0)


def strength_parser(prompt: str, first: str, second: str, strength: str) -> Callable[[Record, str], Example]:
    """Return a parser of two completions and a strength: below 0 the first is better, above 0 the second."""

    def parse(record: Record, _: str) -> Example:
        preference = number_of(record, strength)
        if preference == 0:
            raise tie(record, strength)
        return _pair(record, prompt_of(record, prompt), (first, second), preference < 0, abs(preference))

    return parse


def parse_shp(record: Record, _: str) -> Example:
    """Read the post and its two comments; `labels` is 1 if comment A is preferred."""
    first = label_of(record, "labels", record.values["labels"]) == 1
    return _pair(record, prompt_of(record, "history"), ("human_ref_A", "human_ref_B"), first)


def parse_nectar(record: Record, _: str) -> list[Example]:
    """Make a pair of the best-ranked answer and each of the others with another rank."""
    prompt = prompt_of(record, "prompt")
    answers = list_of(record, "answers")
    entries = [object_of(record, f"answers[{index}]", answer) for index, answer in enumerate(answers)]
    ranks = [rank_of(entry, math.inf) for entry in entries]
    texts = [entry.get("answer") for entry in entries]
    best = ranks.index(min(ranks))
    return _against_each(
        record, "answers", prompt, texts[best], [t for t, r in zip(texts, ranks, strict=True) if r > ranks[best]]
    )


def _against_each(record: Record, column: str, prompt: list[Message], best: Any, others: list[Any]) -> list[Example]:
    if not others:
        raise cell_error(record, column, f"no completion is better than another; {QUARANTINE}")
    chosen = _completion(record, column, best)
    return [
        PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=_completion(record, column, text))
        for text in others
    ]


def parse_oasst_pairs(record: Record, _: str) -> list[Example]:
    """Make pairs at every message of the user: the best-ranked reply and each of the others with another rank."""
    pairs: list[Example] = []
    waiting: list[tuple[list[Message], dict[str, Any]]] = [([], record.values["prompt"])]
    while waiting:
        before, node = waiting.pop()
        messages = [*before, oasst_message(record, node)]
        replies = ranked_replies(node)
        best = rank_of(replies[0], math.inf) if replies else math.inf
        others = [reply.get("text") for reply in replies if math.inf > rank_of(reply, math.inf) > best]
        if messages[-1]["role"] == "user" and others:
            pairs += _against_each(record, "prompt.replies", messages, replies[0].get("text"), others)
        waiting += [(messages, reply) for reply in reversed(replies)]
    if not pairs:
        raise cell_error(record, "prompt", f"no message of the tree has replies with different ranks; {QUARANTINE}")
    return pairs


def parse_tldr(record: Record, _: str) -> Example:
    """Write the post as in the paper's prompts: SUBREDDIT, TITLE, POST (or TITLE and the article), then TL;DR:."""
    info = object_of(record, "info", value_of(record, "info"))
    body = "article" if info.get("article") else "post"
    text = filled_text(record, f"info.{body}", info.get(body), "prompt").replace("\n\n", "\n")
    title = text_of(record, "info.title", info.get("title") or "")
    if body == "post":
        prompt = f"SUBREDDIT: r/{info.get('subreddit')}\n\nTITLE: {title}\n\nPOST: {text}\n\nTL;DR:"
    else:
        prompt = f"TITLE: {title}\n\n{text}\n\nTL;DR:"
    if (choice := value_of(record, "choice")) not in (0, 1):
        raise tie(record, "choice")
    return _pair(record, [make_message("user", prompt)], ("summaries.0.text", "summaries.1.text"), choice == 0)


def parse_arena(record: Record, _: str) -> Example:
    """Read two conversations and the winner; the messages that they begin with together are the prompt.

    `turn` is the number of exchanges that were judged: what follows them is left out.
    """
    winner = value_of(record, "winner")
    if winner not in ("model_a", "model_b"):
        raise tie(record, "winner")
    both = [_judged(record, column) for column in ("conversation_a", "conversation_b")]
    return _with_common_prompt(record, "conversation_b", both if winner == "model_a" else both[::-1])


def _judged(record: Record, column: str) -> list[Message]:
    messages = without_train_key(messages_of(record, column))
    if record.values.get("turn") is not None:
        turns = int(number_of(record, "turn"))
        ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: ends[turns - 1]] if 0 < turns <= len(ends) else messages
    check_assistant_messages(record, column, messages)
    return messages


def _with_common_prompt(record: Record, column: str, both: list[list[Message]]) -> PairExample:
    """Return the pair of two conversations; the messages that they begin with together are the prompt."""
    chosen, rejected = both
    prompt = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))]
    while prompt and prompt[-1]["role"] == "assistant":
        prompt.pop()
    size = len(prompt)
    if not prompt:
        raise cell_error(record, column, "the conversations do not begin with the same prompt")
    if chosen[size:] == rejected[size:]:
        raise cell_error(record, column, f"both conversations are equal; {QUARANTINE}")
    if any(not messages[size:] or messages[size]["role"] != "assistant" for messages in both):
        raise cell_error(record, column, f"the conversations have different messages of the user; {QUARANTINE}")
    return PairExample(
        origin=record.origin, prompt=prompt, chosen=chosen[size:], rejected=rejected[size:], margin=margin_of(record)
    )


def parse_v1_pair(record: Record, _: str) -> Example:
    """Read `chosen_messages` and `rejected_messages` (LLaMA-Factory v1)."""
    both = [without_train_key(messages_of(record, column)) for column in ("chosen_messages", "rejected_messages")]
    for column, messages in zip(("chosen_messages", "rejected_messages"), both, strict=True):
        check_assistant_messages(record, column, messages)
    return _with_common_prompt(record, "rejected_messages", both)


def parse_arena_kaggle(record: Record, _: str) -> Example:
    """Read lists of texts, as JSON: the user's messages and the replies of both models, and the winner."""
    if not (record.values["winner_model_a"] or record.values["winner_model_b"]):
        raise cell_error(
            record, "winner_model_a", f"and winner_model_b are 0: no completion is preferred; {QUARANTINE}"
        )
    asked = list_of(record, "prompt")
    both: list[list[Message]] = []
    for column in ("response_a", "response_b"):
        replies = list_of(record, column)
        if len(replies) != len(asked):
            raise cell_error(record, column, f"{len(replies)} replies for {len(asked)} messages of the user")
        messages: list[Message] = []
        for question, reply in zip(asked, replies, strict=True):
            messages.append(make_message("user", filled_text(record, "prompt", question, "prompt")))
            messages.append(make_message("assistant", filled_text(record, column, reply, "completion")))
        both.append(messages)
    return _with_common_prompt(record, "response_b", both if record.values["winner_model_a"] else both[::-1])


def parse_webgpt(record: Record, _: str) -> Example:
    """Read the question and the answer with the higher score; the margin is the difference."""
    question = nested_value(record, "question.full_text")
    margin = number_of(record, "score_0") - number_of(record, "score_1")
    if margin == 0:
        raise tie(record, "score_0")
    prompt = [make_message("user", filled_text(record, "question.full_text", question, "prompt"))]
    return _pair(record, prompt, ("answer_0", "answer_1"), margin > 0, abs(margin))


def parse_ultrafeedback(record: Record, _: str) -> Example:
    """Make a pair of the best and the worst completion by the mean rating of the aspects; the margin is the difference.

    `overall_score` is not used: completions that were rated worst have a 10 there, for which the files are known.
    """
    prompt = prompt_of(record, "instruction")
    completions = list_of(record, "completions")
    objects = [object_of(record, f"completions[{index}]", value) for index, value in enumerate(completions)]
    scores = [_mean_rating(record, index, completion) for index, completion in enumerate(objects)]
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] == scores[worst]:
        raise cell_error(record, "completions", f"all have the same rating: none is preferred; {QUARANTINE}")
    columns = (f"completions.{best}.response", f"completions.{worst}.response")
    return _pair(record, prompt, columns, True, scores[best] - scores[worst])


def _mean_rating(record: Record, index: int, completion: dict[str, Any]) -> float:
    annotations = completion.get("annotations")
    aspects = annotations.values() if isinstance(annotations, dict) else ()
    written = [str(aspect.get("Rating")) for aspect in aspects if isinstance(aspect, dict)]
    ratings = [float(text) for text in written if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII)]
    if ratings:
        return sum(ratings) / len(ratings)
    score = completion.get("fine-grained_score")
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise cell_error(record, f"completions[{index}]", f"has no ratings in annotations; {QUARANTINE}")
    return float(score)


def parse_openai_pair(record: Record, _: str) -> Example:
    """Read a line of OpenAI's preference fine-tuning: input.messages, preferred_output and non_preferred_output."""
    source = value_of(record, "input")
    if source.get("tools"):
        raise cell_error(record, "input.tools", "pairs with tool definitions are not supported; write them as text")
    inner = Record({**record.values, "input.messages": source.get("messages")}, record.origin)
    prompt = prompt_of(inner, "input.messages")
    chosen, rejected = (completion_of(inner, name, prompt) for name in ("preferred_output", "non_preferred_output"))
    return PairExample(origin=record.origin, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin_of(record))


def is_openai_input(values: dict[str, Any]) -> bool:
    return isinstance(values["input"], dict) and "messages" in values["input"]


def parse_implicit_prompt(record: Record, _: str) -> Example:
    """Read two texts; the words that they begin with together are the prompt (TRL). No chat template is applied."""
    chosen, rejected = (text_of(record, column, record.values[column]) for column in ("chosen", "rejected"))
    same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
    if same == min(len(chosen), len(rejected)):
        same -= 1  # one text begins with all of the other: both completions need a word
    while same > 0 and not chosen[same].isspace():  # the completion begins with the space before its first word
        same -= 1
    prompt, better, worse = chosen[: max(same, 0)], chosen[max(same, 0) :], rejected[max(same, 0) :]
    if not prompt.strip() or not better.strip() or not worse.strip():
        dialogue = r'"\n\nHuman: ...\n\nAssistant: ..."'
        reason = f"expected {dialogue}, texts that begin with the same prompt, or a column prompt as well"
        raise cell_error(record, "chosen", reason)
    return PairExample(
        origin=record.origin,
        prompt=[make_message("user", prompt)],
        chosen=[make_message("assistant", better)],
        rejected=[make_message("assistant", worse)],
        margin=margin_of(record),
        plain=True,
        raw=True,
    )


def is_dialogue_pair(values: dict[str, Any]) -> bool:
    """Whether `chosen` is a list of messages or a text with Human: and Assistant:, as in hh-rlhf."""
    chosen = values["chosen"]
    return not isinstance(chosen, str) or chosen.lstrip().startswith(("Human:", "Assistant:"))


def parse_beavertails(record: Record, _: str) -> Example:
    """Read a completion that is labelled as safe or not."""
    prompt = prompt_of(record, "prompt")
    completion, label = completion_of(record, "response", prompt), label_of(record, "is_safe", record.values["is_safe"])
    return LabelledExample(origin=record.origin, prompt=prompt, completion=completion, label=label)


# Steps


def parse_math_shepherd(record: Record, placeholder: str) -> Example:
    """Read a question and steps that end in "ки", and their labels from the same text with + and - in its place."""
    text, marked = (text_of(record, column, record.values[column]) for column in ("input", "label"))
    *parts, _ = text.split(SHEPHERD_MARK)
    labels: list[float] = []
    at = 0
    for part in parts:
        sign = marked[at + len(part) : at + len(part) + 1]
        if not marked.startswith(part, at) or sign not in ("+", "-"):
            raise cell_error(record, "label", f"step {len(labels) + 1} is not the text of input with + or - after it")
        labels.append(1.0 if sign == "+" else 0.0)
        at += len(part) + 1
    question, *first = SHEPHERD_STEP.split(parts[0] if parts else text, maxsplit=1)
    if not parts or not first or not question.strip():
        raise cell_error(record, "input", f'expected a question, "Step 1:" and {SHEPHERD_MARK!r} after each step')
    steps = [first[0].rstrip(), *(part.rstrip() for part in parts[1:])]
    _check_steps(record, "input", steps, placeholder)
    prompt = [make_message("user", question.strip())]
    return StepwiseExample(origin=record.origin, prompt=prompt, steps=steps, labels=labels, plain=True)


def _check_steps(record: Record, column: str, steps: list[str], placeholder: str) -> None:
    for index, step in enumerate(steps):
        if not step.strip():
            raise cell_error(record, column, f"step {index + 1} is empty")
        if placeholder in step:
            raise cell_error(record, column, f"step {index + 1} contains the placeholder {placeholder!r} itself")


def is_shepherd(values: dict[str, Any]) -> bool:
    return all(isinstance(values[column], str) for column in ("input", "label")) and SHEPHERD_MARK in values["input"]


def parse_prm800k(record: Record, placeholder: str) -> list[Example]:
    """Make an example of the chosen steps, and one of each rated alternative with the chosen steps before it.

    A rating of -1 is wrong; 0 (neutral) counts as correct, as in the paper; steps that were not rated are left out.
    """
    prompt = [make_message("user", filled_text(record, "question", nested_value(record, "question.problem"), "prompt"))]
    chosen: list[tuple[str, float]] = []
    paths: list[list[tuple[str, float]]] = []
    ended = False
    steps_given = nested_value(record, "label.steps")
    if not isinstance(steps_given, list):
        raise cell_error(record, "label.steps", "expected a list")
    for index, value in enumerate(steps_given):
        step = object_of(record, f"label.steps[{index}]", value)
        taken, written = step.get("chosen_completion"), step.get("human_completion")
        rated = [_rated_step(record, f"label.steps[{index}]", entry) for entry in step.get("completions") or []]
        paths += [[*chosen, entry] for at, entry in enumerate(rated) if entry is not None and at != taken]
        if isinstance(taken, int) and 0 <= taken < len(rated) and (entry := rated[taken]) is not None:
            chosen.append(entry)
        elif isinstance(written, dict):
            chosen.append((text_of(record, f"label.steps[{index}].human_completion", written.get("text")), 1.0))
        else:
            ended = True
            break
    if chosen and not (ended and paths):
        paths.append(chosen)
    if not paths:
        raise cell_error(record, "label.steps", f"no step is rated; {QUARANTINE}")
    examples: list[Example] = []
    for path in paths:
        texts = [text for text, _ in path]
        _check_steps(record, "label.steps", texts, placeholder)
        steps = [texts[0], *(f"\n{text}" for text in texts[1:])]
        labels = [label for _, label in path]
        examples.append(StepwiseExample(origin=record.origin, prompt=prompt, steps=steps, labels=labels, plain=True))
    return examples


def _rated_step(record: Record, column: str, value: Any) -> tuple[str, float] | None:
    """Return the text of a completion and its label; None if it was not rated."""
    entry = object_of(record, column, value)
    rating = entry.get("rating")
    if rating is None:
        return None
    if rating not in (-1, 0, 1):
        raise cell_error(record, column, f"has the rating {rating!r}; expected -1, 0 or 1")
    return text_of(record, column, entry.get("text")), float(rating >= 0)


def is_prm800k(values: dict[str, Any]) -> bool:
    question, label = values["question"], values["label"]
    return isinstance(question, dict) and "problem" in question and isinstance(label, dict) and "steps" in label
