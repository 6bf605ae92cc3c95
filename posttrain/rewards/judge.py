"""Asks a language model for verdicts: single completions, pairs, or the ranking of a whole group.

All questions of a batch are asked at the same time, as far as the rubric's limits allow. One that hangs, fails or gets
an unreadable reply costs only the verdicts that depend on it. Readable replies are kept on disk by the content of the
question.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import random
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from posttrain.rewards.remote import JsonService, RefusedRequestError, RemoteError, RemoteTimeoutError
from posttrain.rewards.rubric import JudgeVerdict, Rubric, UnreadableError, messages, prompt_text, read_verdict, schema
from posttrain.rewards.verdict import Completion

Failure = Literal["", "refused", "unreadable", "timeout", "error"]
Counts = defaultdict[str, float]  # requests, tokens, cost, refusals ...
REASON_CHARACTERS = 2000
GRACE = 1.05  # an answer that is this much later than the time limit is not waited for
HEARTBEATS = 4  # signs of progress within the time limit, at least


def new_counts() -> Counts:
    return defaultdict(float)


@dataclass(slots=True, eq=False)
class Question:
    """One request to the judge, about the completions with these indices in the batch, and its result."""

    about: tuple[int, ...]
    shown: tuple[int, ...]  # the same as numbers within the group
    messages: list[dict[str, str]]
    key: str = ""
    verdict: JudgeVerdict | None = None
    reply: str = ""
    failure: Failure = ""
    reason: str = ""
    counts: Counts = field(default_factory=new_counts)
    started: float = 0.0
    seconds: float = 0.0

    @property
    def done(self) -> bool:
        return self.verdict is not None or bool(self.failure)

    def fail(self, failure: Failure, reason: str) -> None:
        self.failure, self.reason = failure, reason[:REASON_CHARACTERS]


@dataclass(slots=True)
class JudgeResult:
    """The result for one completion."""

    value: float | None
    kind: Literal["ok", "error", "timeout"]
    reason: str
    seconds: float = 0.0
    counts: Counts = field(default_factory=new_counts)  # of the questions recorded here
    replies: list[dict[str, Any]] = field(default_factory=list)  # key and text of these questions, and what they show


class ReplyCache:
    """Replies on disk, one file each, named by the hash of the question."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: str) -> str | None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # absent, or damaged: asked again
            return str(json.loads(self._file(key).read_text(encoding="utf-8"))["reply"])
        return None

    def put(self, key: str, reply: str) -> None:
        file = self._file(key)
        with suppress(OSError):  # a full disk must not cost the verdict
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=file.parent)
            with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
                json.dump({"reply": reply}, opened)
            Path(name).replace(file)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


class RateLimit:
    """Books one slot per request, evenly spaced."""

    def __init__(self, per_minute: float) -> None:
        self.interval = 60 / per_minute if per_minute else 0.0
        self.next_slot = 0.0
        self.lock = threading.Lock()

    def seconds_left(self) -> float:
        """Return the time until the next slot."""
        with self.lock:
            return max(0.0, self.next_slot - time.monotonic())

    def book(self) -> float:
        """Book the next slot and return the time until it."""
        with self.lock:
            now = time.monotonic()
            slot = max(now, self.next_slot)
            self.next_slot = slot + self.interval
            return slot - now


class Judge:
    """A language model that gives verdicts by a rubric."""

    def __init__(self, rubric: Rubric, seconds: float, token: str = "", identity: str = "") -> None:
        """`seconds`: for one question, with all attempts; `token`: the service's key.

        `identity`: of a local model, whose replies are kept under it instead of its address.
        """
        self.identity = identity or rubric.base_url
        self.rubric, self.seconds = rubric, seconds
        self.service = JsonService(
            f"{rubric.base_url}/chat/completions", seconds, token=token, attempts=rubric.attempts
        )
        self.cache = ReplyCache(Path(rubric.cache))
        self.limit = RateLimit(rubric.requests_per_minute)
        self.format = "json_schema" if rubric.structured == "auto" else rubric.structured

    def score(
        self,
        completions: Sequence[Completion],
        groups: Sequence[int],
        *,
        recorded: Mapping[str, str],
        timeouts: int,
        progress: Callable[[], None],
    ) -> list[JudgeResult]:
        """Return a result for each completion; those with the same number in `groups` are compared with each other.

        `recorded`: replies of an earlier run by key, which are taken instead of asking; `timeouts`: how many questions
        may time out before the rest is given up; `progress`: called again and again within the time limit.
        """
        questions = list(self._questions(completions, groups))
        for question in questions:
            question.key = self._key(question.messages)
        waiting = deque(question for question in questions if not self._known(question, recorded))
        self._ask_all(waiting, timeouts, progress)
        by_completion: list[list[Question]] = [[] for _ in completions]
        for question in questions:
            for index in question.about:
                by_completion[index].append(question)
        results = [self._result(index, asked) for index, asked in enumerate(by_completion)]
        if self.rubric.swap:
            self._count_flips(questions, results)
        return results

    # What is asked

    def _questions(self, completions: Sequence[Completion], groups: Sequence[int]) -> Iterator[Question]:
        members: dict[int, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        for indices in members.values():
            for about in self._orders(completions, indices):
                first = completions[about[0]]
                reference = first.columns.get(self.rubric.reference) if self.rubric.reference else None
                texts = [completions[index].text for index in about]
                yield Question(
                    about, tuple(map(indices.index, about)), messages(self.rubric, prompt_text(first), texts, reference)
                )

    def _orders(self, completions: Sequence[Completion], indices: list[int]) -> Iterator[tuple[int, ...]]:
        """Yield the completions of each question about one group, in the order in which they are shown.

        The first order is random, as a function of the texts; `swap` asks in the reverse order, too.
        """
        if self.rubric.mode == "pointwise":
            yield from ((index,) for index in indices)
            return
        if len(indices) < 2:
            return
        chosen = [tuple(indices)] if self.rubric.mode == "ranking" else self._pairs(indices)
        for about in chosen:
            text = "\0".join(sorted(completions[index].text for index in about))
            order = sorted(about, key=lambda index: completions[index].text)  # the same for any order of a file
            random.Random(text).shuffle(order)
            yield tuple(order)
            if self.rubric.swap:
                yield tuple(reversed(order))

    def _pairs(self, indices: list[int]) -> list[tuple[int, ...]]:
        count, wanted = len(indices), self.rubric.comparisons
        if not wanted or wanted >= count // 2:
            return list(combinations(indices, 2))
        return [(indices[i], indices[(i + step) % count]) for step in range(1, wanted + 1) for i in range(count)]

    def _key(self, asked: list[dict[str, str]]) -> str:
        rubric = self.rubric
        where = (self.identity, rubric.model, rubric.mode, rubric.temperature, rubric.max_tokens)
        return hashlib.sha256(json.dumps([where, asked], sort_keys=True).encode()).hexdigest()

    def _known(self, question: Question, recorded: Mapping[str, str]) -> bool:
        """Take a reply that was given before, if there is one and it is readable."""
        reply = recorded.get(question.key)
        if reply is None:
            reply = self.cache.get(question.key)
        if reply is not None:
            with suppress(UnreadableError):
                question.verdict = read_verdict(self.rubric, reply, len(question.about))
                question.reply = reply
                question.counts["cached"] += 1
        return question.verdict is not None

    # Asking

    def _ask_all(self, waiting: deque[Question], timeouts: int, progress: Callable[[], None]) -> None:
        """Ask all questions in threads. A thread that does not end in time is left behind, and its question fails."""
        asked, running = list(waiting), set[Question]()
        finished: queue.SimpleQueue[Question] = queue.SimpleQueue()
        beat = self.seconds / HEARTBEATS
        while waiting or running:
            while waiting and len(running) < self.rubric.concurrency and not self.limit.seconds_left():
                self.limit.book()
                question = waiting.popleft()
                question.started = time.monotonic()
                running.add(question)
                threading.Thread(target=self._ask_and_put, args=(question, finished), daemon=True).start()
            pause = min(beat, self.limit.seconds_left() or beat) if waiting else beat
            with suppress(queue.Empty):
                running.discard(finished.get(timeout=max(pause, 0.001)))
            for question in [each for each in running if time.monotonic() - each.started > self.seconds * GRACE]:
                running.discard(question)
                question.fail("timeout", f"{self.service.address} did not respond within {self.seconds:g} s")
            timed_out = sum(question.failure == "timeout" for question in asked)
            if timed_out > timeouts:
                for question in waiting:
                    question.fail("error", "not asked: too many questions before it timed out")
                waiting.clear()
            progress()

    def _ask_and_put(self, question: Question, finished: queue.SimpleQueue[Question]) -> None:
        asked = replace(question)  # with the same counts; a late answer must not change the result
        try:
            self._ask(asked)
        except RemoteTimeoutError as error:
            asked.fail("timeout", str(error))
        except RemoteError as error:
            asked.fail("error", str(error))
        except RefusedRequestError as error:
            asked.fail("error", str(error))
        except Exception as error:
            asked.fail("error", f"{type(error).__name__}: {error}")
            raise
        finally:
            if not question.done:
                question.verdict, question.reply = asked.verdict, asked.reply
                question.failure, question.reason = asked.failure, asked.reason
                question.seconds = time.monotonic() - question.started
                finished.put(question)

    def _ask(self, question: Question) -> None:
        """Ask until a reply is readable; replies that are not are counted and paid for, too."""
        started, booked = time.monotonic(), True  # the slot of the first request

        def before_attempt(end: float) -> None:
            nonlocal booked
            pause, booked = 0.0 if booked else self.limit.book(), False
            if time.monotonic() + pause > end:
                raise RemoteTimeoutError("requests_per_minute leaves no time for another attempt")
            time.sleep(pause)
            question.counts["requests"] += 1

        for _ in range(self.rubric.attempts):
            if self._read(question, self._post(question, before_attempt)) or time.monotonic() - started > self.seconds:
                return

    def _post(self, question: Question, before_attempt: Callable[[float], None]) -> Any:
        """Send a question; a service that refuses a JSON schema is asked without one from then on."""
        try:
            return self.service.post(self._body(question, self.format), before_attempt)
        except RefusedRequestError:
            if self.rubric.structured != "auto" or self.format == "text":
                raise
        response = self.service.post(self._body(question, "text"), before_attempt)
        self.format = "text"
        return response

    def _body(self, question: Question, form: str) -> dict[str, Any]:
        rubric = self.rubric
        body: dict[str, Any] = {
            "model": rubric.model,
            "messages": question.messages,
            "temperature": rubric.temperature,
            "max_tokens": rubric.max_tokens,
        }
        if form == "json_schema":
            wanted = {"name": "verdict", "strict": True, "schema": schema(rubric, len(question.about))}
            body["response_format"] = {"type": "json_schema", "json_schema": wanted}
        elif form == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body

    def _read(self, question: Question, response: Any) -> bool:
        """Read a response; returns whether asking again would be useless, as there is a verdict or a refusal."""
        rubric = self.rubric
        try:
            choice = response["choices"][0]
            message, finish = choice["message"], choice.get("finish_reason")
            text, refusal = message.get("content"), message.get("refusal")
        except (LookupError, TypeError, AttributeError):
            question.counts["unreadable"] += 1
            question.fail("unreadable", f"not a chat completion: {str(response)[:200]}")
            return False
        usage = response.get("usage")
        for name, price in (("prompt_tokens", rubric.prompt_price), ("completion_tokens", rubric.completion_price)):
            used = usage.get(name) if isinstance(usage, dict) else None
            if isinstance(used, int) and not isinstance(used, bool):
                question.counts[name] += used
                question.counts["cost"] += used * price / 1e6
        if refusal or finish == "content_filter":
            question.counts["refused"] += 1
            question.fail("refused", f"the judge refused: {refusal or finish}")
            return True
        try:
            question.verdict = read_verdict(rubric, text if isinstance(text, str) else "", len(question.about))
        except UnreadableError as error:
            question.counts["unreadable"] += 1
            question.fail("unreadable", f"unreadable verdict: {error}{' (cut at max_tokens)' * (finish == 'length')}")
            return False
        question.reply, question.failure, question.reason = text, "", ""
        self.cache.put(question.key, text)
        return True

    # Results

    def _result(self, index: int, questions: Sequence[Question]) -> JudgeResult:
        """Average the verdicts about a completion. A question is recorded with the completion it shows first."""
        own = [question for question in questions if question.about[0] == index]
        counts = new_counts()
        for question in own:
            for name, number in question.counts.items():
                counts[name] += number
        replies = [
            {"key": question.key, "shown": list(question.shown), "reply": question.reply}
            | ({"failure": question.failure, "reason": question.reason} if question.failure else {})
            for question in own
        ]
        found = [(q, q.verdict.values[q.about.index(index)]) for q in questions if q.verdict is not None]
        if found:
            value = sum(each for _, each in found) / len(found)
            reason, seconds = self._reason(found), sum(question.seconds for question in own)
            return JudgeResult(value, "ok", reason, seconds, counts, replies)
        if not questions:
            reason = f"mode {self.rubric.mode} compares completions of one prompt, but there is only one"
            return JudgeResult(None, "error", reason)
        kind: Literal["error", "timeout"] = "timeout" if all(q.failure == "timeout" for q in questions) else "error"
        reason = f"{questions[0].failure}: {questions[0].reason}"
        return JudgeResult(None, kind, reason, self.seconds, counts, replies)

    def _reason(self, found: Sequence[tuple[Question, float]]) -> str:
        question, _ = found[0]
        assert question.verdict is not None
        explanation = question.verdict.explanation.strip()[:REASON_CHARACTERS]
        if self.rubric.mode == "pointwise":
            scores = ", ".join(f"{name} {score:g}" for name, score in question.verdict.scores.items())
            return f"{scores}; {explanation}" if explanation else scores
        if self.rubric.mode == "ranking":
            return f"placed {', '.join(f'{value:.2g}' for _, value in found)} of 1; {explanation}"
        won, lost = (sum(value == end for _, value in found) for end in (1.0, 0.0))
        return f"won {won}, lost {lost}, tied {len(found) - won - lost}; {explanation}"

    def _count_flips(self, questions: Sequence[Question], results: Sequence[JudgeResult]) -> None:
        """Count pairs that were shown in both orders, and those of them about which the verdicts differ."""
        if not self.rubric.compares:
            return
        for forward, backward in zip(questions[::2], questions[1::2], strict=True):
            counts = results[forward.about[0]].counts
            for question in (forward, backward):
                if question.verdict is not None:
                    values = question.verdict.values
                    counts["decided"] += sum(a != b for a, b in combinations(values, 2))
                    counts["first_preferred"] += sum(a > b for a, b in combinations(values, 2))
            if forward.verdict is not None and backward.verdict is not None:
                one, other = forward.verdict.values, backward.verdict.values[::-1]
                pairs = list(combinations(range(len(one)), 2))
                counts["swapped"] += len(pairs)
                counts["flipped"] += sum(_sign(one[a] - one[b]) != _sign(other[a] - other[b]) for a, b in pairs)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
