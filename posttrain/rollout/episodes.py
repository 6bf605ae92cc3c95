"""Episodes of the policy with environments, in tokens that are only appended.

tokens   prompt | reply 1 | environment | reply 2      the sampled tokens are the trained tokens
mask        0   |    1    |      0      |    1         the environment's tokens are not trained on

Concurrent episodes advance independently: each joins the batch of the local engine when its environment has returned,
so a slow one delays no other. In lock step, all replies of a turn are generated in one call, then all environments
advance. Seeds depend on the episode and the turn, so both give the same rollouts, up to rounding in the batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import PosttrainError
from posttrain.core.types import Experts, Prompt, Sample, TurnCredit
from posttrain.data.encoding.chat import ChatRenderer
from posttrain.data.encoding.tokens import Segment, TokenEncoder
from posttrain.endpoint.engine_thread import CompletionThread, PendingCompletion, completion_thread, shared_engine
from posttrain.engines.base import GenerationRequest, Generator, Sampling, seed_for
from posttrain.rollout.environments import STOPPED, EnvironmentProcess, Environments, Episode
from posttrain.rollout.records import ENVIRONMENT_FAILED, Rollout
from posttrain.sandbox.supervisor import STOP_SECONDS, RunStoppedError

KEPT_CONTINUATIONS, KEPT_CHARACTERS = 10_000, 200  # most turns of environments whose tokens are kept; of each, its text


@dataclass(slots=True)
class TokenizedEpisode:
    """One episode from the model's side: its tokens, and which of them the model sampled."""

    position: int
    prompt: Prompt
    seed: int
    episode: Episode
    messages: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: Experts | None = None  # of the tokens up to the end of the last reply, if the engine records them
    text: str = ""
    reply_end: str = ""  # the stop token or stop text at the end of the last reply, as text
    finish: str = ""
    versions: list[int] = field(default_factory=list)  # of the weights, at the start and the end of each reply
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prompt_tokens: int = 0  # of the prompts of all turns
    reused_tokens: float = 0.0  # of them, found in the engine's KV cache
    spans: list[tuple[int, int]] = field(default_factory=list)  # first token of each reply, and the one after its last
    turn_seconds: list[tuple[float, float]] = field(default_factory=list)  # per reply: of the environment before; model
    environment_seconds: float = 0.0  # of its last start or step
    started: float = field(default_factory=time.monotonic)

    def append(self, tokens: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append tokens; those with log-probabilities were sampled by the model."""
        self.tokens += tokens
        self.mask += [logprobs is not None] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs

    def add_experts(self, experts: Experts) -> None:
        """Add the experts recorded in the last turn. Those of earlier replies are kept: they sampled the replies."""
        experts = experts[: len(self.tokens)].copy()
        if self.experts is not None:
            known = self.experts >= 0
            experts[: len(known)][known] = self.experts[known]
        self.experts = experts

    def fail(self, reason: str) -> None:
        self.episode.failure, self.finish = reason, "error"

    @property
    def over(self) -> bool:
        """Whether the last reply was answered by the environment, and no other will follow."""
        return bool(self.finish) and not self.episode.waits

    @property
    def completion_length(self) -> int:
        """Tokens of all turns, including the environment's."""
        return len(self.tokens) - len(self.prompt.tokens)

    def rollout(self) -> Rollout:
        sample = Sample(
            tokens=np.array(self.tokens, dtype=np.int32),
            mask=np.array(self.mask, dtype=np.bool_),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            experts=None if self.experts is None else pad_experts(self.experts, len(self.tokens)),
            group=self.position,
            version=self.versions[0] if self.versions else 0,
            newest=self.versions[-1] if self.versions else 0,
            finish=self.finish,
            origin=self.prompt.origin,
            preemptions=self.preemptions,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            reused=self.reused_tokens / max(1, self.prompt_tokens),
            turns=self.turn_credits(),
        )
        failure = self.episode.failure
        return Rollout(
            sample=sample,
            prompt=self.prompt,
            text=self.text,
            messages=self.messages,
            turns=len(self.episode.replies),
            turn_seconds=self.turn_seconds,
            rewards={"environment": sum(result.reward for result in self.episode.results)},
            failure=f"{ENVIRONMENT_FAILED}{failure}" if failure else "",
        )

    def turn_credits(self) -> tuple[TurnCredit, ...]:
        """Return what credit over turns needs: where each reply is, its reward, and the state that it replied to."""
        earned = [result.reward for result in self.episode.results[1:]]
        earned += [0.0] * (len(self.spans) - len(earned))  # the environment failed
        states = [result.state for result in self.episode.results]
        return tuple(
            (first, end, reward, state) for (first, end), reward, state in zip(self.spans, earned, states, strict=False)
        )


def pad_experts(experts: Experts, tokens: int) -> Experts:
    """Append tokens without a record: those of the environment after the last reply."""
    return np.pad(experts, ((0, tokens - len(experts)), (0, 0), (0, 0)), constant_values=-1)


class EpisodePlayer(Protocol):
    """Plays episodes of several turns: with environments, or as the conversations of an agent."""

    def play(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[Rollout]:
        """Return rollouts for each prompt and seed, in order; `greedy`: one for each, without random numbers."""


class EpisodeRunner:
    """Runs episodes: concurrently where the local engine generates on an accelerator, else in lock step."""

    def __init__(
        self, environments: Environments, policy: Generator, config: OnlineConfig, sampling: Sampling, tokenizer: Any
    ) -> None:
        self.environments, self.policy, self.sampling, self.tokenizer = environments, policy, sampling, tokenizer
        self.max_prompt_length = config.data.max_length
        self.schedule, self.most = config.rollout.environment_schedule, config.rollout.max_concurrent_episodes
        self.max_turns, self.max_seconds = config.rollout.max_turns, config.rollout.episode_timeout_seconds
        # Without batches ahead a stopped batch is made again with the same weights, so nothing is lost.
        self.stop_seconds = STOP_SECONDS if config.rollout.ahead else 0.0
        self.encoder = TokenEncoder(tokenizer)
        self.chat = ChatRenderer(tokenizer, self.encoder)
        self.tools: list[dict[str, Any]] | None = None  # that the chat template describes to the model
        self.engine_seconds = 0.0  # in which completions were computed, since the start
        self.continuations: dict[tuple[str, ...], list[int]] = {}  # tokens of short messages of environments

    def play(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[Rollout]:
        """Return a rollout for each prompt and seed; a RewardError if too many environments failed."""
        running = [
            TokenizedEpisode(position, prompt, seed, Episode(prompt.columns | {"messages": prompt.messages}))
            for (position, prompt), seed in zip(prompts, seeds, strict=True)
        ]
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        if self.is_concurrent():
            self.play_concurrently(running, sampling)
        else:
            size = self.most or len(running)
            for first in range(0, len(running), size):
                self.play_in_lock_step(running[first : first + size], sampling)
        self.environments.check_failures([each.episode for each in running])
        return [self.rollout(each) for each in running]

    def rollout(self, tokenized: TokenizedEpisode) -> Rollout:
        return tokenized.rollout()

    def is_concurrent(self) -> bool:
        """Whether episodes advance independently: by default not on a CPU, which computes them one by one then."""
        if self.schedule != "auto":
            return self.schedule == "concurrent"
        engine = shared_engine(self.policy)
        return engine is not None and engine.device.type != "cpu"

    def play_in_lock_step(self, running: Sequence[TokenizedEpisode], sampling: Sampling) -> None:
        """Play episodes turn by turn: one call of the generator for all replies, then one step of each environment."""
        for each in running:
            each.started = time.monotonic()  # those of the next part have waited for these
        self.advance(running)
        for each in running:
            self.start(each)
        while unfinished := [each for each in running if not each.finish]:
            limits = [self.room(each) for each in unfinished]
            requests = [self.request(each) for each in unfinished]
            began = time.monotonic()
            samples = self.policy.generate(requests, replace(sampling, max_tokens=max(limits)))
            seconds = time.monotonic() - began
            self.engine_seconds += seconds
            for each, sample in zip(unfinished, samples, strict=True):
                self.add_reply(each, sample, seconds)
            self.advance(unfinished)
            for each in unfinished:
                self.append_environment_turn(each)
        self.environments.end([each.episode for each in running])

    def advance(self, running: Sequence[TokenizedEpisode]) -> None:
        """Run one step of each environment; all have its time, since they wait for each other."""
        began = time.monotonic()
        self.environments.advance([each.episode for each in running], self.stop_seconds)
        for each in running:
            each.environment_seconds = time.monotonic() - began

    def play_concurrently(self, running: Sequence[TokenizedEpisode], sampling: Sampling) -> None:
        """Play episodes independently of each other; RunStoppedError if the run was asked to stop."""
        thread = completion_thread(self.policy, self.max_prompt_length, sampling.max_tokens)
        episodes = ConcurrentEpisodes(self, thread, sampling)
        try:
            with self.environments.work(self.stop_seconds) as processes, ThreadPoolExecutor(1) as loop:
                # A thread of its own: the caller's may have an event loop already, as in a notebook.
                loop.submit(asyncio.run, episodes.run(running, processes)).result()
        finally:
            self.environments.end([each.episode for each in running])
        self.engine_seconds += getattr(thread, "busy_seconds", 0.0)
        if not all(each.over for each in running):
            raise RunStoppedError(STOPPED)

    def start(self, tokenized: TokenizedEpisode) -> None:
        """Encode the messages that `start` returned; they replace the prompt."""
        episode, prompt = tokenized.episode, tokenized.prompt
        tokens = prompt.tokens
        if not episode.failure:
            tokenized.messages = list(episode.results[0].messages or [])
            try:
                messages = self.for_template(tokenized.messages)
                segments = self.chat.prompt(messages, self.chat.is_plain, prompt.origin, self.tools)
                [encoded] = self.encoder.encode([segments])
                tokens = np.array([token for ids in encoded for token in ids], dtype=np.int32)
            except PosttrainError as error:  # the chat template refuses these messages
                episode.failure = str(error)
        if not 0 < len(tokens) <= self.max_prompt_length:
            limit = f"data.max_length is {self.max_prompt_length}"
            episode.failure = f"the messages that start returned have {len(tokens)} tokens; {limit}"
            tokens = prompt.tokens
        tokenized.prompt = replace(prompt, tokens=tokens, messages=list(tokenized.messages or prompt.messages))
        tokenized.append(tokens.tolist())
        if episode.failure:
            tokenized.fail(episode.failure)

    def room(self, tokenized: TokenizedEpisode) -> int:
        """Return what is left of rollout.max_tokens for the next reply."""
        return self.sampling.max_tokens - tokenized.completion_length

    def request(self, tokenized: TokenizedEpisode) -> GenerationRequest:
        turn, seed = len(tokenized.episode.replies), tokenized.seed
        return GenerationRequest(
            prompt=np.array(tokenized.tokens, dtype=np.int32),
            group=tokenized.position,
            seed=seed_for(seed, turn, 0) if turn else seed,  # first turn: as without an environment
            reuse_prefix=True,
        )

    def add_reply(self, tokenized: TokenizedEpisode, sample: Sample, seconds: float) -> None:
        """Append what was sampled, as far as there is room, and pass its text to the environment."""
        start, limit = len(tokenized.tokens), self.room(tokenized)
        tokens = sample.tokens[start:].tolist()
        assert sample.logprobs is not None, "a generator returns log-probabilities"
        tokenized.versions += [sample.version, sample.newest]
        tokenized.preemptions += sample.preemptions
        tokenized.draft_tokens += sample.draft_tokens
        tokenized.accepted_tokens += sample.accepted_tokens
        tokenized.prompt_tokens += start
        tokenized.reused_tokens += sample.reused * start
        tokenized.turn_seconds.append((tokenized.environment_seconds, seconds))
        tokenized.append(tokens[:limit], sample.logprobs[start : start + limit].tolist())
        tokenized.spans.append((start, len(tokenized.tokens)))
        if sample.experts is not None:
            tokenized.add_experts(sample.experts)
        tokenized.finish = "length" if len(tokens) > limit else sample.finish
        tokenized.text = self.tokenizer.decode(tokens[:limit], skip_special_tokens=True)
        tokenized.reply_end = self.find_reply_end(tokens[:limit], tokenized.text) if tokenized.finish == "stop" else ""
        message, event = self.read_reply(tokenized, start)
        tokenized.messages.append(message)
        tokenized.episode.replies.append(event)

    def read_reply(self, tokenized: TokenizedEpisode, start: int) -> tuple[dict[str, Any], Any]:
        """Return the reply that begins at token `start` as a message, and as the environment gets it."""
        return {"role": "assistant", "content": tokenized.text}, tokenized.text

    def for_template(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as the chat template takes them."""
        return messages

    def find_reply_end(self, tokens: list[int], text: str) -> str:
        """Return the stop token or the stop text that a reply ends with, as text."""
        if tokens[-1] in self.sampling.stop_ids:
            return self.tokenizer.decode(tokens[-1:], skip_special_tokens=False)
        return next((stop for stop in self.sampling.stop_texts if text.endswith(stop)), "")

    def append_environment_turn(self, tokenized: TokenizedEpisode) -> None:
        """Encode and append the messages that `step` returned; without messages or room the episode is over."""
        episode = tokenized.episode
        if episode.failure:
            tokenized.fail(episode.failure)
            return
        new_messages = episode.results[-1].messages
        if new_messages is None or tokenized.finish == "length":
            return
        if self.max_turns and len(episode.replies) >= self.max_turns:
            tokenized.finish = "length"
            return
        if self.max_seconds and time.monotonic() - tokenized.started > self.max_seconds:
            tokenized.fail(f"the episode did not end within {self.max_seconds:g} s (rollout.episode_timeout_seconds)")
            return
        messages = [*tokenized.messages, *new_messages]
        try:
            tokens = self.continuation_tokens(messages, len(tokenized.messages) - 1, tokenized)
        except PosttrainError as error:
            tokenized.fail(str(error))
            return
        if tokenized.completion_length + len(tokens) >= self.sampling.max_tokens:
            tokenized.finish = "length"  # no room for another reply
            return
        tokenized.append(tokens)
        tokenized.messages, tokenized.finish = messages, ""

    def continuation_tokens(self, messages: list[dict[str, Any]], reply: int, tokenized: TokenizedEpisode) -> list[int]:
        """Encode the messages after message `reply`, as the chat template writes them after it.

        The template does not see the texts up to there, so other episodes with equal roles and the same new texts have
        the same tokens: short ones are kept.
        """
        key = None
        if not self.tools and all(len(message) == 2 for message in messages):
            texts = [message["content"] for message in messages[reply + 1 :]]
            if sum(map(len, texts)) <= KEPT_CHARACTERS:
                key = (tokenized.reply_end, *texts, *(message["role"] for message in messages))
        if key is not None and key in self.continuations:
            return self.continuations[key]
        origin = tokenized.prompt.origin
        segment = self.chat.continuation(self.for_template(messages), reply, tokenized.reply_end, origin, self.tools)
        [[_, tokens]] = self.encoder.encode([[Segment(()), segment]])  # not at the start of a text: no second BOS
        if key is not None:
            if len(self.continuations) >= KEPT_CONTINUATIONS:
                self.continuations.clear()
            self.continuations[key] = tokens
        return tokens


class ConcurrentEpisodes:
    """Episodes that advance independently: a coroutine each, in one event loop; environments run in other threads."""

    def __init__(self, runner: EpisodeRunner, engine: CompletionThread, sampling: Sampling) -> None:
        self.runner, self.engine, self.sampling = runner, engine, sampling

    async def run(self, episodes: Sequence[TokenizedEpisode], threads: Sequence[ThreadPoolExecutor]) -> None:
        """Play all episodes; after a stop of the run, those that are not over are left. `threads`: of the processes."""
        processes = self.runner.environments.processes
        self.processes = [ProcessQueue(*pair) for pair in zip(processes, threads, strict=True)]
        self.free = asyncio.Semaphore(self.runner.most or len(episodes) or 1)
        ended = self.engine.start()
        tasks = [asyncio.ensure_future(self.play(each)) for each in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.engine.close()
            await ended  # raises the error of the engine, which is the first cause

    async def play(self, tokenized: TokenizedEpisode) -> None:
        runner, environments, episode = self.runner, self.runner.environments, tokenized.episode
        async with self.free:
            if environments.stop_flag.is_set():
                return
            loads = [process.episodes for process in self.processes]
            process = self.processes[environments.place(episode, loads.index(min(loads)))]
            process.episodes += 1
            tokenized.started = time.monotonic()
            if not await self.advance(tokenized):
                return
            runner.start(tokenized)
            while not tokenized.finish:
                began = time.monotonic()
                sample = await self.reply(tokenized)
                runner.add_reply(tokenized, sample, time.monotonic() - began)
                if not await self.advance(tokenized):
                    return
                runner.append_environment_turn(tokenized)
            process.end(episode)

    async def advance(self, tokenized: TokenizedEpisode) -> bool:
        """Run the next step of the environment; False if the run was asked to stop before it ended."""
        began = time.monotonic()
        await self.processes[tokenized.episode.process].advance(tokenized.episode)
        tokenized.environment_seconds = time.monotonic() - began
        return not tokenized.episode.waits

    async def reply(self, tokenized: TokenizedEpisode) -> Sample:
        """Generate the next reply."""
        room = self.sampling.max_tokens  # of whole batches: equal for all, so that there is one call for them
        if self.engine.has_top_logprobs:
            room = self.runner.room(tokenized)
        sampling = replace(self.sampling, max_tokens=room)
        completion = PendingCompletion(self.runner.request(tokenized), sampling, asyncio.Event(), streamed=False)
        self.engine.submit([completion])
        await completion.changed.wait()
        if completion.sample is None:
            raise PosttrainError("the engine ended before all episodes were over")
        return completion.sample


class ProcessQueue:
    """What waits for one environment process: it is sent together, and each result is delivered when it comes."""

    def __init__(self, process: EnvironmentProcess, thread: ThreadPoolExecutor) -> None:
        """`thread`: in which all calls of the process are made."""
        self.process, self.thread = process, thread
        self.episodes = 0  # that it has, and that are not over
        self.waiting: dict[int, tuple[Episode, asyncio.Future[None]]] = {}  # by number of the episode
        self.ended: list[Episode] = []
        self.sender: asyncio.Task[None] | None = None

    async def advance(self, episode: Episode) -> None:
        """Wait for the episode's next result; there is none if the run was asked to stop."""
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting[episode.number] = (episode, result)
        if self.sender is None or self.sender.done():
            self.sender = asyncio.ensure_future(self.send())
        await result

    async def send(self) -> None:
        """Make calls until nothing waits."""
        loop = asyncio.get_running_loop()
        while self.waiting:
            sent, self.waiting = self.waiting, {}
            ended, self.ended = self.ended, []

            def deliver(number: int, sent: dict[int, tuple[Episode, asyncio.Future[None]]] = sent) -> None:
                if not sent[number][1].done():
                    sent[number][1].set_result(None)

            def on_result(episode: Episode, deliver: Callable[[int], None] = deliver) -> None:
                loop.call_soon_threadsafe(deliver, episode.number)

            episodes = [episode for episode, _ in sent.values()]
            called = loop.run_in_executor(self.thread, self.call, episodes, ended, on_result)
            try:
                await asyncio.wait([called])
                if (error := called.exception()) is not None:  # not of an environment: it ends the batch
                    for _, result in sent.values():
                        if not result.done():
                            result.set_exception(error)
                    return
            finally:
                for number in sent:  # those that failed, or were given up after a stop
                    deliver(number)

    def call(self, episodes: Sequence[Episode], ended: Sequence[Episode], on_result: Callable[[Episode], None]) -> None:
        """Make one call of the process; in its thread."""
        for episode in ended:
            self.process.end(episode)
        self.process.advance(episodes, on_result)

    def end(self, episode: Episode) -> None:
        """Free an episode that is over, with the next call."""
        self.ended.append(episode)
        self.episodes -= 1
