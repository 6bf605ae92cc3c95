"""Recorded completions: filtered by the index, searched, shown with their tokens, compared between runs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from posttrain.board.rollout_index import FAILED, TRUNCATED, UNREADABLE, Records, RolloutIndex, escaped
from posttrain.board.runs import BoardRun, is_number, parse
from posttrain.board.token_texts import TokenPieces, token_texts

SHORT_TEXT = 400  # letters of a text in a list
LONG_TEXT = 200_000  # of one that is shown alone
MAX_TOKENS = 20_000  # that are shown with their values
MAX_GROUP = 64  # completions side by side
MAX_MESSAGES = 1_000
SEARCH_SECONDS = 0.6  # of one request; the page asks for the rest
NOT_STREAMS = {"tokens", "prompt", "messages", "experts", "experts_shape"}

NO_HISTOGRAM = (np.zeros(0), np.zeros(0))

Order = Literal["newest", "oldest", "reward_high", "reward_low", "longest", "shortest"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which completions to show; None and empty values do not restrict."""

    step: int | None = None
    group: int | None = None
    prompt: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    failed: bool | None = None
    truncated: bool | None = None
    many_turns: bool | None = None
    text: str = ""
    order: Order = "newest"

    def select(self, records: Records) -> NDArray[Any]:
        """Return the numbers of the completions that fit, in order; the text is not looked at."""
        fits = np.ones(len(records), bool)
        for name, value in (("step", self.step), ("group", self.group), ("prompt", self.prompt)):
            if value is not None:
                fits &= records[name] == value
        scored = records["flags"] & (FAILED | UNREADABLE) == 0
        if self.min_reward is not None:
            fits &= scored & (records["reward"] >= self.min_reward)
        if self.max_reward is not None:
            fits &= scored & (records["reward"] <= self.max_reward)
        if self.min_length is not None:
            fits &= records["length"] >= self.min_length
        if self.max_length is not None:
            fits &= records["length"] <= self.max_length
        if self.failed is not None:
            fits &= (records["flags"] & FAILED != 0) == self.failed
        if self.truncated is not None:
            fits &= (records["flags"] & TRUNCATED != 0) == self.truncated
        if self.many_turns is not None:
            fits &= (records["turns"] > 1) == self.many_turns
        return ordered(np.flatnonzero(fits), records, self.order)


def ordered(numbers: NDArray[Any], records: Records, order: Order) -> NDArray[Any]:
    if order == "oldest":
        return numbers
    if order == "newest":
        return numbers[::-1]
    field, sign = {
        "reward_high": ("reward", -1.0),
        "reward_low": ("reward", 1.0),
        "longest": ("length", -1.0),
        "shortest": ("length", 1.0),
    }[order]
    values = sign * records[field][numbers].astype(np.float64)
    if field == "reward":  # one that was not scored has none, so it comes last
        values[records["flags"][numbers] & (FAILED | UNREADABLE) != 0] = np.nan
    return numbers[np.argsort(values, kind="stable")]


class RolloutReader:
    """The recorded completions of one run."""

    def __init__(self, run: BoardRun, cache: Path | None) -> None:
        self.run, self.index = run, RolloutIndex(run, cache)
        self._texts: tuple[tuple[str, ...] | None, TokenPieces | None] = (None, None)

    def page(self, wanted: Filter, offset: int, limit: int) -> dict[str, Any]:
        """Return a page of completions; with a text, those found from `offset` on within the time of one request."""
        records = self.index.refresh()
        numbers = wanted.select(records)
        found: list[dict[str, Any]] = []
        place = offset
        if wanted.text:
            place = self.search(numbers, wanted.text, offset, limit, found)
        else:
            found = [listed(number, row) for number, row in self.rows(numbers[offset : offset + limit])]
            place = min(len(numbers), offset + limit)
        return {
            "rows": found,
            "matching": len(numbers),
            "next": place if place < len(numbers) else None,
            "searched": place if wanted.text else None,
            "index": self.index.progress(),
            "statistics": statistics(records, numbers),
        }

    def search(self, numbers: NDArray[Any], text: str, start: int, limit: int, found: list[dict[str, Any]]) -> int:
        """Add completions that hold the text, in any case; return where to go on."""
        deadline = time.monotonic() + SEARCH_SECONDS
        needle, place = escaped(text).lower(), start
        for number, line in self.index.lines(numbers[start:]):
            place += 1
            if line is not None and needle in line.lower():  # cheap; tokens and names of keys are excluded below
                row = parse(line)
                if row is not None and any(text.casefold() in shown.casefold() for shown in searched_texts(row)):
                    found.append(listed(number, row))
            if len(found) == limit or time.monotonic() > deadline:
                break
        return place

    def rows(self, numbers: NDArray[Any]) -> Iterable[tuple[int, dict[str, Any] | None]]:
        for number, line in self.index.lines(numbers):
            yield number, parse(line)

    def completion(self, number: int) -> dict[str, Any] | None:
        """Return one completion in full, with its tokens; None if there is no such number."""
        records = self.index.refresh()
        if not 0 <= number < len(records):
            return None
        ((_, row),) = self.rows(np.array([number]))
        return self.full(number, row)

    def group(self, number: int) -> dict[str, Any] | None:
        """Return the completions of the same step and prompt."""
        records = self.index.refresh()
        if not 0 <= number < len(records):
            return None
        record = records[number]
        numbers = np.flatnonzero((records["step"] == record["step"]) & (records["group"] == record["group"]))
        shown = numbers[:MAX_GROUP]
        return {
            "step": int(record["step"]),
            "group": int(record["group"]),
            "prompt": str(record["prompt"]),
            "count": len(numbers),
            "completions": [self.full(one, row) for one, row in self.rows(shown)],
            "neighbours": neighbours(records, number),
        }

    def full(self, number: int, row: dict[str, Any] | None) -> dict[str, Any]:
        if row is None:
            return {"number": number, "unreadable": True}
        return completion(number, row, LONG_TEXT) | {"tokens": self.tokens(row), "columns": clip(row.get("columns"))}

    def tokens(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the tokens as texts, which of them count, and the numbers that are recorded for those."""
        numbers, mask = row.get("tokens"), row.get("mask")
        if not isinstance(numbers, list) or not isinstance(mask, str) or len(numbers) != len(mask):
            return None
        texts, counted = self.texts(), mask.count("1")
        ids = [number if isinstance(number, int) else -1 for number in numbers[:MAX_TOKENS]]
        kept = mask[:MAX_TOKENS]
        streams = {
            name[:60]: [rounded(value) for value in values[: kept.count("1")]]
            for name, values in row.items()
            if name not in NOT_STREAMS and isinstance(values, list) and values and len(values) == counted
        }
        if "old_logprobs" in streams and "logprobs" in streams:
            pairs = zip(streams["old_logprobs"], streams["logprobs"], strict=True)
            streams["ratio"] = [rounded(math.exp(min(50.0, a - b))) if None not in (a, b) else None for a, b in pairs]  # type: ignore[operator]
        if "ref_logprobs" in streams and "logprobs" in streams:
            pairs = zip(streams["logprobs"], streams["ref_logprobs"], strict=True)
            streams["logprobs - ref_logprobs"] = [rounded(a - b) if None not in (a, b) else None for a, b in pairs]  # type: ignore[operator]
        return {
            "ids": ids,
            "texts": texts.texts(ids) if texts else None,
            "mask": kept,
            "streams": streams,
            "left_out": len(numbers) - len(ids),
        }

    def texts(self) -> TokenPieces | None:
        """Return the texts of tokens, read again when there is a newer checkpoint."""
        newest = next(self.run.tokenizer_files(), None)
        if self._texts[1] is None or self._texts[0] != newest:
            self._texts = (newest, token_texts(self.run))
        return self._texts[1]

    def prompts(self) -> dict[int, tuple[int, float, int]]:
        """Return by prompt: how many completions, their mean reward, and the number of the newest."""
        records = self.index.refresh()
        scored = records[records["flags"] & (FAILED | UNREADABLE) == 0]
        hashes, place, counts = np.unique(scored["prompt"], return_inverse=True, return_counts=True)
        sums = np.bincount(place, weights=scored["reward"], minlength=len(hashes))
        newest = np.zeros(len(hashes), np.int64)
        np.maximum.at(newest, place, np.flatnonzero(records["flags"] & (FAILED | UNREADABLE) == 0))
        return {
            int(key): (int(count), float(total / count), int(last))
            for key, count, total, last in zip(hashes, counts, sums, newest, strict=True)
        }

    def of_prompt(self, prompt: int, limit: int) -> list[dict[str, Any]]:
        """Return the newest completions of a prompt."""
        numbers = Filter(prompt=prompt).select(self.index.refresh())[:limit]
        return [completion(n, row, LONG_TEXT) if row else listed(n, None) for n, row in self.rows(numbers)]


def shared_prompts(readers: Sequence[RolloutReader], limit: int = 200) -> dict[str, Any]:
    """Return the prompts that all runs completed, those first whose mean rewards differ most."""
    by_run = [reader.prompts() for reader in readers]
    shared = set(by_run[0]).intersection(*by_run[1:])

    def spread(prompt: int) -> float:
        means = [prompts[prompt][1] for prompts in by_run]
        return max(means) - min(means)

    chosen = sorted(shared, key=lambda prompt: (-spread(prompt), prompt))[:limit]
    newest = np.array([by_run[0][prompt][2] for prompt in chosen], np.int64)
    texts = {number: prompt_text(row or {}) for number, row in readers[0].rows(newest)}
    return {
        "shared": len(shared),
        "prompts": [
            {
                "prompt": str(prompt),
                "text": texts.get(by_run[0][prompt][2], "")[:SHORT_TEXT],
                "runs": [{"count": p[prompt][0], "reward": finite(p[prompt][1])} for p in by_run],
            }
            for prompt in chosen
        ],
        "indexes": [reader.index.progress() for reader in readers],
    }


def statistics(records: Records, numbers: NDArray[Any]) -> dict[str, Any]:
    """Return counts, means and a histogram of the rewards of chosen completions."""
    flags, lengths = records["flags"][numbers], records["length"][numbers]
    rewards = records["reward"][numbers][flags & (FAILED | UNREADABLE) == 0]
    rewards = rewards[np.isfinite(rewards)]
    counts, edges = np.histogram(rewards if np.ptp(rewards) < 1e300 else [], bins=24) if len(rewards) else NO_HISTOGRAM
    return {
        "all": len(records),
        "failed": int(np.count_nonzero(flags & FAILED)),
        "truncated": int(np.count_nonzero(flags & TRUNCATED)),
        "unreadable": int(np.count_nonzero(flags & UNREADABLE)),
        "mean_reward": finite(rewards.mean()) if len(rewards) else None,
        "mean_length": finite(lengths.mean()) if len(lengths) else None,
        "histogram": {"counts": [int(n) for n in counts], "edges": [float(edge) for edge in edges]},
        "last_step": int(records["step"].max()) if len(records) else None,
        "first_step": int(records["step"].min()) if len(records) else None,
    }


def neighbours(records: Records, number: int) -> dict[str, int | None]:
    """Return a completion of the group before and of the group after this one."""
    key = records[["step", "group"]]
    here = key[number]
    before, after = number, number
    while before >= 0 and key[before] == here:
        before -= 1
    while after < len(records) and key[after] == here:
        after += 1
    return {"before": before if before >= 0 else None, "after": after if after < len(records) else None}


# Rows as values that a page can show: of known types and bounded sizes


def listed(number: int, row: dict[str, Any] | None) -> dict[str, Any]:
    return {"number": number, "unreadable": True} if row is None else completion(number, row, SHORT_TEXT, short=True)


def completion(number: int, row: Mapping[str, Any], limit: int, short: bool = False) -> dict[str, Any]:
    """Return the fields of a row that are shown."""
    mask, advantages, rewards = row.get("mask"), row.get("advantages"), row.get("rewards")
    text = row["text"] if isinstance(row.get("text"), str) else ""
    advantage = None
    if isinstance(advantages, list) and advantages and all(map(is_number, advantages)):
        advantage = sum(advantages) / len(advantages)
    found = {
        "number": number,
        **{name: row[name] for name in ("step", "group", "version", "newest", "turns") if is_number(row.get(name))},
        "origin": clip(row.get("origin"), 1_000),
        "finish": clip(row.get("finish"), 40),
        "reward": rounded(row.get("reward")),
        "rewards": {
            str(name)[:200]: rounded(value) for name, value in (rewards if isinstance(rewards, dict) else {}).items()
        },
        "advantage": rounded(advantage),
        "failure": clip(row.get("failure"), limit),
        "seconds": rounded(row.get("seconds")),
        "length": mask.count("1") if isinstance(mask, str) else None,
        "prompt_length": row.get("prompt_length") if is_number(row.get("prompt_length")) else None,
        "text": text[:limit],
        "letters": len(text),
    }
    if short:
        return found | {"prompt_text": prompt_text(row)[:limit]}
    conversation = row.get("messages") or row.get("prompt")
    return found | {"messages": messages_of(conversation, limit), "whole": bool(row.get("messages"))}


def messages_of(value: Any, limit: int) -> list[dict[str, Any]]:
    """Return the messages of a conversation: role, content, reasoning, tool calls."""
    if not isinstance(value, list):
        return []
    found: list[dict[str, Any]] = []
    for message in value[:MAX_MESSAGES]:
        if not isinstance(message, dict):
            found.append({"role": "?", "content": clip(message, limit)})
            continue
        calls = message.get("tool_calls")
        found.append(
            {
                "role": clip(message.get("role", "?"), 60),
                "name": clip(message.get("name") or message.get("tool_call_id"), 200),
                "content": content_text(message.get("content"))[:limit],
                "reasoning": clip(message.get("reasoning_content") or message.get("reasoning"), limit),
                "tool_calls": [tool_call(call, limit) for call in calls[:100]] if isinstance(calls, list) else [],
            }
        )
    return found


def tool_call(call: Any, limit: int) -> dict[str, str]:
    inner = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(inner, dict):
        return {"name": "?", "arguments": clip(inner, limit)}
    return {"name": clip(inner.get("name"), 200), "arguments": clip(inner.get("arguments"), limit)}


def content_text(content: Any) -> str:
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return clip(content, LONG_TEXT)


def clip(value: Any, limit: int = LONG_TEXT) -> str:
    """Return a value as text of bounded length: a text as it is, anything else as JSON."""
    if value is None:
        return ""
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str))[:limit]


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the last message of a prompt."""
    messages = messages_of(row.get("prompt"), LONG_TEXT)
    return messages[-1]["content"] if messages else ""


def searched_texts(row: Mapping[str, Any]) -> Iterable[str]:
    yield from (clip(row.get(name)) for name in ("text", "failure", "origin"))
    for message in (*messages_of(row.get("messages"), LONG_TEXT), *messages_of(row.get("prompt"), LONG_TEXT)):
        yield message["content"]
        yield from (call["name"] + " " + call["arguments"] for call in message.get("tool_calls", ()))


def finite(value: Any) -> float | None:
    return float(value) if is_number(float(value)) else None


def rounded(value: Any) -> float | None:
    """Return a number with the digits that are worth sending; None for anything else."""
    return float(f"{value:.6g}") if is_number(value) else None
