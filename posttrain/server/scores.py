"""/v1/score: a reward model for `--reward http://...`, here or on another machine."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.data.reading.examples import Message
from posttrain.inference.completion_files import Answer
from posttrain.inference.score import RewardModel
from posttrain.models.loading import read_config, resolve_path
from posttrain.server.http import Call, Handler, Refusal, Reply
from posttrain.server.metrics import Metrics
from posttrain.server.protocol import read_json, read_message, read_text

MOST_COMPLETIONS = 1024  # of one request
METRICS = {
    "scores_total": "Completions that were scored; failed: they could not be.",
    "waiting": "Completions that are being scored or wait for it.",
}


def has_score_head(path: str) -> bool:
    """Whether the model scores conversations, instead of answering them."""
    architectures = read_config(resolve_path(path), "score").architectures or ()
    return any("SequenceClassification" in name for name in architectures)


class Scores:
    """Serves one reward model to many, one request after another."""

    def __init__(self, model: RewardModel, *, name: str, queue: int, seconds: float, metrics: Metrics) -> None:
        self.model, self.name, self.queue, self.seconds, self.metrics = model, name, queue, seconds, metrics
        self.plain = not model.learner.tokenizer.chat_template
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self.waiting = 0
        self.routes: dict[str, Handler] = {"/v1/score": self.score}

    def start(self) -> asyncio.Future[None]:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return self.closed

    def close(self) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)
        self.closed.set_result(None)

    def gauges(self) -> dict[str, float]:
        return {"waiting": self.waiting}

    async def score(self, call: Call) -> Reply:
        answers = self.read(read_json(call.body))
        if self.waiting and self.waiting + len(answers) > self.queue:
            raise Refusal(429, f"{self.waiting} completions wait already; try again later", code="queue_full")
        self.waiting += len(answers)
        try:
            async with asyncio.timeout(self.seconds):
                loop = asyncio.get_running_loop()
                verdicts = await loop.run_in_executor(self.thread, self.model.verdicts, answers)
        except TimeoutError:
            raise Refusal(504, f"it took longer than {self.seconds:g} s", code="timeout") from None
        finally:
            self.waiting -= len(answers)
        rewards = [verdict.value for verdict in verdicts]
        failed = rewards.count(None)
        self.metrics.count("scores_total", len(rewards) - failed, result="ok")
        self.metrics.count("scores_total", failed, result="failed")
        reasons = [verdict.reason for verdict in verdicts]
        return Reply(json.dumps({"model": self.name, "rewards": rewards, "reasons": reasons}).encode())

    def read(self, body: dict[str, Any]) -> list[Answer]:
        """What `posttrain` sends, `completions`; or the lists of OpenRLHF, `query` and `prompts`."""
        found = body.get("completions")
        if found is None and isinstance(body.get("query"), list):
            found = completions_of(body)
        if not isinstance(found, list) or not found:
            raise Refusal(400, "completions: expected a list of objects with messages and text", param="completions")
        if len(found) > MOST_COMPLETIONS:
            raise Refusal(400, f"{len(found)} completions; one request may have {MOST_COMPLETIONS}")
        return [self.answer(completion, f"completions[{place}]") for place, completion in enumerate(found)]

    def answer(self, completion: Any, where: str) -> Answer:
        if not isinstance(completion, dict):
            raise Refusal(400, f"{where}: expected an object with messages and text", param=where)
        text = read_text(completion.get("text"), f"{where}.text", empty=True)
        told = completion.get("messages") or [{"role": "user", "content": completion.get("prompt")}]
        if not isinstance(told, list):
            raise Refusal(400, f"{where}.messages: expected a list", param=where)
        messages = [read_message(message, f"{where}.messages[{i}]") for i, message in enumerate(told)]
        if len(messages) > 1 and messages[-1]["role"] == "assistant":  # a whole conversation: its last answer is known
            text = str(messages.pop()["content"])
        if self.plain:
            messages = [{"role": "user", "content": "".join(str(message["content"]) for message in messages)}]
        return Answer(prompt=messages, plain=self.plain, text=text, row={}, origin=where)


def completions_of(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Each query is a prompt and its answer in one text."""
    queries, prompts = body["query"], body.get("prompts")
    if not isinstance(prompts, list) or len(prompts) != len(queries):
        raise Refusal(400, "prompts: expected a list as long as query", param="prompts")
    found: list[dict[str, Any]] = []
    for place, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        if not isinstance(query, str) or not isinstance(prompt, str) or not query.startswith(prompt):
            raise Refusal(400, f"query[{place}] must begin with prompts[{place}]", param="query")
        told: list[Message] = [{"role": "user", "content": prompt}]
        found.append({"messages": told, "text": query[len(prompt) :]})
    return found
