"""/v1/score: a reward model for `--reward http://...`, on this machine or another."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from posttrain.data.reading.examples import LabelledExample
from posttrain.endpoint.errors import ApiError
from posttrain.endpoint.http import Handler
from posttrain.endpoint.metrics import ServerMetrics
from posttrain.endpoint.protocol import read_messages, read_string
from posttrain.endpoint.request_fields import parse_body
from posttrain.models.loading import read_config
from posttrain.models.paths import resolve_path
from posttrain.train.reward_model import RewardModel

MAX_COMPLETIONS = 1024  # of one request
METRICS = {
    "scores_total": "Scored completions; failed: those that could not be scored.",
    "waiting": "Completions that are being scored or wait for it.",
}


def has_score_head(path: str) -> bool:
    """Whether the model scores conversations, instead of generating completions."""
    architectures = read_config(resolve_path(path), "score").architectures or ()
    return any("SequenceClassification" in name for name in architectures)


class ScoreService:
    """Serves one reward model; requests are scored one after another."""

    def __init__(self, model: RewardModel, *, name: str, queue: int, seconds: float, metrics: ServerMetrics) -> None:
        """`queue`: completions that may wait."""
        self.model, self.name, self.queue, self.seconds, self.metrics = model, name, queue, seconds, metrics
        self.names: tuple[str, ...] = (name,)
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

    async def score(self, request: HttpRequest) -> Response:
        completions = self.read(parse_body(await request.body()))
        if self.waiting and self.waiting + len(completions) > self.queue:
            message = f"{self.waiting} completions are waiting already; try again later"
            raise ApiError(429, message, code="queue_full")
        self.waiting += len(completions)
        try:
            async with asyncio.timeout(self.seconds):
                loop = asyncio.get_running_loop()
                verdicts = await loop.run_in_executor(self.thread, self.model.score, completions)
        except TimeoutError:
            message = f"the request took longer than {self.seconds:g} s, the server's limit"
            raise ApiError(504, message, code="timeout") from None
        finally:
            self.waiting -= len(completions)
        rewards = [verdict.value for verdict in verdicts]
        failed = rewards.count(None)
        self.metrics.count("scores_total", len(rewards) - failed, result="ok")
        self.metrics.count("scores_total", failed, result="failed")
        reasons = [verdict.reason for verdict in verdicts]
        return JSONResponse({"model": self.name, "rewards": rewards, "reasons": reasons})

    def read(self, body: dict[str, Any]) -> list[LabelledExample]:
        """Read either `completions`, which posttrain sends, or the lists `query` and `prompts` of OpenRLHF."""
        found = body.get("completions")
        if found is None and isinstance(body.get("query"), list):
            found = split_queries(body)
        if not isinstance(found, list) or not found:
            raise ApiError(400, "completions: expected a list of objects with messages and text", param="completions")
        if len(found) > MAX_COMPLETIONS:
            raise ApiError(400, f"{len(found)} completions; one request may have {MAX_COMPLETIONS}")
        return [self.completion(value, f"completions[{place}]") for place, value in enumerate(found)]

    def completion(self, value: Any, where: str) -> LabelledExample:
        if not isinstance(value, dict):
            raise ApiError(400, f"{where}: expected an object with messages and text", param=where)
        text = read_string(value.get("text"), f"{where}.text", empty=True)
        messages = read_messages(
            value.get("messages") or [{"role": "user", "content": value.get("prompt")}], f"{where}.messages"
        )
        if len(messages) > 1 and messages[-1]["role"] == "assistant":  # the whole conversation
            text = str(messages.pop()["content"])
        return self.model.completion(messages, text, finish=str(value.get("finish", "")), origin=where)


def split_queries(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Split each query, a prompt and its completion in one text, into the two."""
    queries, prompts = body["query"], body.get("prompts")
    if not isinstance(prompts, list) or len(prompts) != len(queries):
        raise ApiError(400, "prompts: expected a list as long as query", param="prompts")
    found: list[dict[str, Any]] = []
    for place, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
        if not isinstance(query, str) or not isinstance(prompt, str) or not query.startswith(prompt):
            raise ApiError(400, f"query[{place}] must begin with prompts[{place}]", param="query")
        found.append({"messages": [{"role": "user", "content": prompt}], "text": query[len(prompt) :]})
    return found
