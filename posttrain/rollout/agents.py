"""Agents: programs that talk to the policy through an OpenAI-compatible endpoint, and return a reward.

    def agent(example, client):
        messages = [{"role": "user", "content": example["question"]}]
        reply = client.chat.completions.create(model="policy", messages=messages)
        return float("42" in reply.choices[0].message.content)

Each conversation has a child process to itself, which later conversations use again. A program that crashes, hangs or
is killed costs one conversation. All conversations of a batch that have a process go on at the same time, each at its
own speed; the engine generates what is asked for at the moment in one batch.
"""

from __future__ import annotations

import logging
import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np

from posttrain.config.sections import OnlineConfig
from posttrain.core.errors import UsageError
from posttrain.core.types import Prompt, Sample
from posttrain.endpoint.engine_thread import completion_thread
from posttrain.endpoint.http import address_of, listen
from posttrain.engines.base import Generator, Sampling
from posttrain.rollout.agent_endpoint import HOST, MODEL, AgentConversation, AgentEndpoint, AgentSession
from posttrain.rollout.conversations import Turn
from posttrain.rollout.environments import check_failure_rate
from posttrain.rollout.foreign import split_agent
from posttrain.rollout.records import AGENT, AGENT_FAILED, Rollout
from posttrain.sandbox.process import ProcessDiedError, ProcessLimits, ProcessTimeoutError
from posttrain.sandbox.supervisor import STOP_SECONDS, ProcessSupervisor, RunStoppedError, StopFlag
from posttrain.sandbox.user_code import parse_location

FUNCTION = re.compile(r"\S+:[A-Za-z_]\w*")
ATTEMPTS = 2  # a process that died may have been killed from outside

log = logging.getLogger("posttrain")


@dataclass(slots=True, eq=False)
class AgentRun:
    """One conversation of a batch: what it is about, and how it went."""

    position: int
    prompt: Prompt
    seed: int
    conversation: AgentConversation | None = None  # of the last attempt
    rewards: dict[str, float] | None = None
    turn_rewards: list[float] | None = None  # of the model's replies, in their order, if the agent returned them
    failure: str = ""
    seconds: float = 0.0
    attempts: int = 0
    done: bool = False

    @property
    def example(self) -> dict[str, Any]:
        return self.prompt.columns | {"messages": self.prompt.messages}

    @property
    def turns(self) -> list[Turn]:
        return self.conversation.tree.turns if self.conversation is not None else []

    def check(self, needs_reward: bool) -> None:
        """Complete the result after the program has ended."""
        if self.failure and self.turns and self.conversation is not None and self.conversation.too_long:
            self.failure, self.rewards = "", {"": 0.0}  # it ended because there was no room: like a truncated reply
        elif not self.failure and not self.turns:
            self.failure = "the agent made no request that the model replied to"
        elif not self.failure and self.turn_rewards is not None and len(self.turn_rewards) != len(self.turns):
            counts = f"{len(self.turn_rewards)} rewards of turns, but the model replied {len(self.turns)} times"
            self.failure = f"the agent returned {counts}"
        elif not self.failure and self.rewards is None and needs_reward:
            self.failure = "the agent returned no reward, and reward.functions is not set"

    def rollouts(self) -> list[Rollout]:
        """Return a rollout per branch of the conversation; one if it failed."""
        assert self.conversation is not None, "it has not run"
        failure = f"{AGENT_FAILED}{self.failure}" if self.failure else ""
        rewards = {f"{AGENT}/{name}" if name else AGENT: value for name, value in (self.rewards or {}).items()}
        found: list[Rollout] = []
        for leaf, sample in self.conversation.tree.samples(self.position):
            path = leaf.path
            if self.turn_rewards is not None and not self.failure:
                rewards_of = [self.turn_rewards[turn.number] for turn in path]
                spans = zip(sample.turns, rewards_of, strict=True)
                sample.turns = tuple((first, end, earned, state) for (first, end, _, state), earned in spans)
            if self.failure:
                sample.finish = "error"
            elif self.conversation.too_long:
                sample.finish = "length"
            messages = [message for turn in path for message in (*turn.messages, turn.reply)]
            prompt = replace(self.prompt, tokens=path[0].added, messages=path[0].messages)
            text = str(leaf.reply["content"])
            rollout = Rollout(
                sample=sample, prompt=prompt, text=text, messages=messages, turns=len(path), rewards=dict(rewards)
            )
            rollout.failure, rollout.branch = failure, len(found)
            rollout.turn_seconds = [turn.seconds for turn in path]
            found.append(rollout)
        if not found:
            tokens = self.prompt.tokens
            mask = np.zeros(len(tokens), dtype=np.bool_)
            streams = np.zeros(len(tokens), dtype=np.float32)
            sample = Sample(tokens=tokens, mask=mask, logprobs=streams, group=self.position, finish="error")
            sample.origin = self.prompt.origin
            found = [Rollout(sample=sample, prompt=self.prompt, text="", turns=0, failure=failure)]
        return found[:1] if self.failure else found


class AgentProcess:
    """Runs one conversation after another in a child process; when it is lost, the next one starts a new process."""

    def __init__(self, agents: Agents, limits: ProcessLimits) -> None:
        self.agents = agents
        self.supervisor = ProcessSupervisor("posttrain.rollout.agent_child", limits, agents.stop_flag)
        self.key = secrets.token_urlsafe(24)  # of clients that the program makes when it is imported

    def load(self) -> None:
        request = self.agents.program | {"base_url": self.agents.base_url, "api_key": self.key, "model": MODEL}
        self.supervisor.load(self.agents.name, request)

    def run(self, run: AgentRun, session: AgentSession) -> None:
        """Run the program for one conversation; after a stop of the run it is not done."""
        while not run.done and not self.agents.stop_flag.is_set():
            run.attempts += 1
            conversation = run.conversation = session.open(run.seed, run.prompt.origin)
            session.endpoint.conversations[self.key] = conversation
            started = time.monotonic()
            try:
                reply = self.ask(run, conversation)
                run.rewards, run.failure = reply.get("rewards"), reply.get("error", "")
                run.turn_rewards = reply.get("turn_rewards")
                if reply["threads_left"] and conversation.by_process_key:
                    self.supervisor.stop()  # a later request with the process's key would be for another conversation
                run.done = True
            except ProcessTimeoutError:
                seconds = self.supervisor.limits.seconds
                run.failure = f"the agent did not end within {seconds:g} s (rollout.agent_timeout_seconds)"
                self.supervisor.stop()
                run.done = True
            except ProcessDiedError as error:
                self.supervisor.stop()
                run.failure = str(error)
                run.done = run.attempts >= ATTEMPTS and not self.agents.stop_flag.is_set()
            except UsageError as error:  # it was loaded before: its file must have changed
                run.failure, run.done = str(error), not self.agents.stop_flag.is_set()
            finally:
                session.close(conversation)
                run.seconds = time.monotonic() - started

    def ask(self, run: AgentRun, conversation: AgentConversation) -> dict[str, Any]:
        self.load()
        request = {
            "example": run.example,
            "base_url": self.agents.base_url,
            "api_key": conversation.key,
            "model": MODEL,
            "seconds": self.supervisor.limits.seconds,
        }
        replies = list(self.supervisor.ask(request))
        if len(replies) != 1:
            raise ProcessDiedError("a reply is missing")
        return replies[0]


class Agents:
    """The processes of a user's program, and the endpoint that it talks to; a context manager, which ends them."""

    def __init__(
        self,
        spec: str,
        *,
        workers: int = 16,
        timeout_seconds: float = 300.0,
        memory_gib: float = 2.0,
        max_failure_rate: float = 0.1,
        env: Sequence[str] = (),
    ) -> None:
        """`spec`: as rollout.agent has it; `env`: variables that it may read."""
        self.name, self.timeout_seconds = f"rollout.agent {spec}", timeout_seconds
        self.max_failure_rate = max_failure_rate
        self.program = parse_program(spec)
        self.stop_flag = StopFlag()
        limits = ProcessLimits(seconds=timeout_seconds, memory_gib=memory_gib, env=tuple(env))
        self.processes = [AgentProcess(self, limits) for _ in range(workers)]
        self.sockets = listen(HOST, 0)
        self.base_url = f"{address_of(HOST, self.sockets)}/v1"
        self.endpoint: AgentEndpoint | None = None
        self.warned: set[str] = set()
        self.lock = threading.Lock()  # an evaluation may run while the next batch is generated

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Raise a UsageError if the program cannot be loaded."""
        try:
            self.processes[0].load()
        except (ProcessDiedError, ProcessTimeoutError) as error:
            raise UsageError(f"the process for agents did not start: {error}") from error

    def stop_when(self, requested: Callable[[], bool]) -> None:
        """Set the function that tells whether the run was asked to stop; agents are then not waited for any longer."""
        self.stop_flag.stop_requested = requested

    def start_endpoint(self, tokenizer: Any, stop_ids: Sequence[int]) -> AgentEndpoint:
        if self.endpoint is None:
            self.endpoint = AgentEndpoint(tokenizer, stop_ids, self.timeout_seconds, self.sockets)
            self.endpoint.start()
        return self.endpoint

    def run(self, runs: Sequence[AgentRun], session: AgentSession, stop_seconds: float) -> None:
        """Run all conversations, as many at a time as there are processes.

        Once a stop is requested (`stop_when`), this ends after `stop_seconds` with a RunStoppedError.
        """
        waiting: SimpleQueue[AgentRun] = SimpleQueue()
        for run in runs:
            waiting.put(run)

        def work(process: AgentProcess) -> None:
            while not self.stop_flag.is_set():
                try:
                    run = waiting.get_nowait()
                except Empty:
                    return
                process.run(run, session)

        used = self.processes[: len(runs)]
        with (
            self.lock,
            ThreadPoolExecutor(len(used), thread_name_prefix="agents") as threads,
            self.stop_flag.work(stop_seconds),
        ):
            for future in [threads.submit(work, process) for process in used]:
                future.result()
        if not all(run.done for run in runs):
            raise RunStoppedError("the run was asked to stop while agents were running")

    def warn_once(self, text: str) -> None:
        if text not in self.warned:
            self.warned.add(text)
            log.warning(text)

    def close(self) -> None:
        """End all processes and the endpoint."""
        self.stop_flag.interrupted.set()
        with self.lock:
            for process in self.processes:
                process.supervisor.stop()
            if self.endpoint is not None:
                self.endpoint.close()
            for opened in self.sockets:
                opened.close()


class AgentRunner:
    """Plays conversations of agents with a generator, and returns them as rollouts."""

    def __init__(
        self, agents: Agents, generator: Generator, config: OnlineConfig, sampling: Sampling, tokenizer: Any
    ) -> None:
        self.agents, self.generator, self.sampling = agents, generator, sampling
        self.max_prompt_length = config.data.max_length
        self.needs_reward = not config.reward.functions
        # Without batches ahead a stopped batch is made again with the same weights, so nothing is lost.
        self.stop_seconds = STOP_SECONDS if config.rollout.ahead else 0.0
        self.endpoint = agents.start_endpoint(tokenizer, sampling.stop_ids)

    def play(
        self, prompts: Sequence[tuple[int, Prompt]], seeds: Sequence[int], *, greedy: bool = False
    ) -> list[Rollout]:
        """Return the rollouts of a conversation for each prompt and seed; a RewardError if too many of them failed."""
        runs = [AgentRun(position, prompt, seed) for (position, prompt), seed in zip(prompts, seeds, strict=True)]
        sampling = replace(self.sampling, temperature=0.0) if greedy else self.sampling
        thread = completion_thread(self.generator, self.max_prompt_length, self.sampling.max_tokens)
        with self.endpoint.session(thread, sampling, self.max_prompt_length) as session:
            self.agents.run(runs, session, self.stop_seconds)
        for run in runs:
            run.check(self.needs_reward)
        self.warn(runs, session)
        failures = [run.failure for run in runs if run.failure]
        agents = self.agents
        check_failure_rate(agents.name, failures, len(runs), agents.max_failure_rate, "conversations")
        if greedy:  # a baseline per prompt
            return [run.rollouts()[0] for run in runs]
        return [rollout for run in runs for rollout in run.rollouts()]

    def warn(self, runs: Sequence[AgentRun], session: AgentSession) -> None:
        """Log, once each, what was done otherwise than programs asked."""
        for name in sorted(session.overridden):
            self.agents.warn_once(
                f"{self.agents.name}: requests set {name}, which is not followed in training: tokens are sampled as "
                "the options of rollout say, since that is what is trained"
            )
        for run in runs:
            if run.attempts > 1:
                self.agents.warn_once(f"{self.agents.name}: a process died, and its conversation began again")
            if run.conversation is not None and (refusals := run.conversation.tree.refusals):
                self.agents.warn_once(
                    f"{self.agents.name}: a request continues an earlier reply, but not its tokens, so it begins a new "
                    f"branch: {refusals[0]}"
                )


def parse_program(spec: str) -> dict[str, Any]:
    """Return the request that loads a program into its process; UsageError if there is no such file or command."""
    where = f"rollout.agent {spec!r}"
    if foreign := split_agent(spec):
        return {"package": foreign[0], "name": foreign[1]}
    if FUNCTION.fullmatch(spec):
        return asdict(parse_location(spec, where, "function"))
    try:
        command = shlex.split(spec)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if not command:
        raise UsageError(f"{where}: expected FILE.py:FUNCTION, package.module:FUNCTION or a command")
    if shutil.which(command[0], path=str(Path(sys.executable).parent)) is None and shutil.which(command[0]) is None:
        raise UsageError(f"{where}: there is no command {command[0]}; a function is given as FILE.py:FUNCTION")
    return {"command": command, "folder": str(Path.cwd())}
