"""The process in which reward functions run: `python -m posttrain.rewards.child REQUESTS REPLIES`, two pipes.

The parent's side is pool.py. A request names a loaded reward and has up to 32 completions; each completion is answered
by one reply, in order.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from posttrain.core.errors import UsageError
from posttrain.rewards import signatures
from posttrain.rewards.builtin import verifiers
from posttrain.rewards.judge import Judge
from posttrain.rewards.remote import RemoteError, RemoteTimeoutError, RewardService
from posttrain.rewards.rubric import rubric_from
from posttrain.rewards.verdict import Completion
from posttrain.rewards.verifier import settings
from posttrain.sandbox.callables import unpack_function
from posttrain.sandbox.request_loop import REASON_LIMIT, CatchAll, Reply, RequestLoop
from posttrain.sandbox.user_code import CodeLocation, import_location


@dataclasses.dataclass(slots=True, frozen=True)
class LoadedReward:
    """A reward that is ready to score: `call` returns what the function returns for these completions."""

    call: Callable[[Sequence[Completion]], Any]
    batch: bool  # takes several completions per call
    adapted: signatures.AdaptedFunction | None = None
    may_abstain: bool = True  # None means that it does not apply; from a service it means that it failed


class RewardRequestLoop(RequestLoop):
    """Loads reward functions, verifiers and services, and scores completions with them."""

    def __init__(self, requests: int, replies: int) -> None:
        super().__init__(requests, replies)
        self.rewards: dict[str, LoadedReward] = {}
        self.judges: dict[str, Judge] = {}
        self.used = False  # has called a function, which may have kept memory

    def set_limits(self, request: dict[str, Any]) -> None:
        super().set_limits(request)
        settings.seconds = self.seconds

    def load(self, request: dict[str, Any]) -> Reply:
        spec, columns = request["spec"], request["columns"]
        if spec["kind"] == "judge":
            rubric = rubric_from(spec["rubric"])
            token = request["token"] or os.environ.get(rubric.api_key_env, "")
            self.judges[spec["text"]] = Judge(rubric, self.seconds * 0.9, token, request["identity"])
            return {"batch": True}
        settings.allow_unprotected_code = request["allow_unprotected_code"]
        reward = self.rewards.get(spec["text"]) or load_reward(spec, self.seconds)
        missing = reward.adapted.missing(columns) if reward.adapted and columns else []
        if missing:
            raise UsageError(
                f"the function has parameters that are not columns of the data: {', '.join(missing)}; "
                f"the columns are {', '.join(columns)}"
            )
        self.rewards[spec["text"]] = reward
        return {"batch": reward.batch}

    def serve(self, request: dict[str, Any]) -> None:
        if request["spec"] in self.judges:
            self._judge(self.judges[request["spec"]], request)
            return
        reward = self.rewards[request["spec"]]
        completions = [Completion(**fields) for fields in request["completions"]]
        if reward.batch and len(completions) > 1 and not request["one_by_one"]:
            results = self._score_batch(reward, completions)
            if results is not None:
                for index, result in enumerate(results):
                    self.reply({"index": index, **result})
                return
        for index, completion in enumerate(completions):
            fresh, self.used = not self.used, True
            result = self._score_one(reward, completion)
            out_of_memory = result["kind"] == "error" and "MemoryError" in result["reason"]
            if fresh or not out_of_memory:  # otherwise an earlier one may hold the memory: this one is repeated
                self.reply({"index": index, **result})
            if out_of_memory:
                self.reply({"retire": True})  # the next completion gets a new process
                return

    def _judge(self, judge: Judge, request: dict[str, Any]) -> None:
        """Score with a judge: signs of progress, then its replies and the result for each completion."""

        def progress() -> None:
            self.start_clock()
            self.reply({"progress": True})  # restarts the parent's deadline

        completions = [Completion(**fields) for fields in request["completions"]]
        results = judge.score(
            completions,
            request["groups"],
            recorded=request["recorded"],
            timeouts=request["timeouts"],
            progress=progress,
        )
        for index, result in enumerate(results):
            for reply in result.replies:
                self.reply({"judge_reply": reply})
            self.reply(
                {
                    "index": index,
                    "kind": result.kind,
                    "value": result.value,
                    "reason": result.reason[-REASON_LIMIT:],
                    "seconds": result.seconds,
                    "counts": result.counts,
                }
            )

    def _score_batch(self, reward: LoadedReward, completions: list[Completion]) -> list[Reply] | None:
        """Score all in one call; None if it failed, as calls with one completion may show which of them is at fault."""
        self.used = True
        start = self.start_clock()
        with CatchAll() as caught:
            results = signatures.many_results(reward.call(completions), len(completions))
            seconds = (time.perf_counter() - start) / len(completions)
            return [success(result, seconds, reward) for result in results]
        if isinstance(caught.error, (RemoteError, signatures.ScalarForBatchError)):
            return [failure(caught, time.perf_counter() - start)] * len(completions)
        self.reply({"one_by_one": True})  # restarts the parent's deadline
        return None

    def _score_one(self, reward: LoadedReward, completion: Completion) -> Reply:
        start = self.start_clock()
        with CatchAll() as caught:
            result = reward.call([completion])
            if reward.batch:
                (result,) = signatures.many_results(result, 1)
            return success(result, time.perf_counter() - start, reward)
        return failure(caught, time.perf_counter() - start)


def load_reward(spec: dict[str, Any], seconds: float) -> LoadedReward:
    """Load a verifier, a service or a user's function; a UsageError says what the user must change."""
    place = spec["place"]
    if spec["kind"] == "verifier":
        verifier = verifiers()[place]
        verifier.prepare()
        return LoadedReward(lambda completions: verifier.score(completions[0]), batch=False)
    if spec["kind"] == "remote":  # less than the parent's deadline, so that the service's own error is reported
        return LoadedReward(RewardService(place, seconds * 0.9).score, batch=True, may_abstain=False)
    if spec["packed"] is not None:
        function = unpack_function(spec["packed"])
    else:
        function = import_location(CodeLocation(place, spec["function"]), "function", callable)
    adapted = signatures.adapt(function, spec["function"])
    return LoadedReward(adapted.call, adapted.form.batch, adapted)


def success(result: Any, seconds: float, reward: LoadedReward) -> Reply:
    """Return the reply for one result of a function; an error if it is neither a finite number nor None."""
    with CatchAll() as caught:
        value, reason = signatures.one_result(result)
        if value is None and not reward.may_abstain:
            raise ValueError(f"the service has no reward for this completion: {reason}")
        kind = "not_applicable" if value is None else "ok"
        return {"kind": kind, "value": value, "reason": reason[-REASON_LIMIT:], "seconds": seconds}
    return failure(caught, seconds)


def failure(caught: CatchAll, seconds: float) -> Reply:
    error = caught.error
    kind = "timeout" if isinstance(error, RemoteTimeoutError) else "error"
    reason = str(error) if isinstance(error, RemoteError) else caught.text
    return {"kind": kind, "value": None, "reason": reason, "seconds": seconds}


if __name__ == "__main__":
    RewardRequestLoop(int(sys.argv[1]), int(sys.argv[2])).run()
