"""Environments: a user's class that replies to the model turn by turn; one object per episode, in child processes.

    class Game:
        def start(self, example): return [{"role": "user", "content": example["question"]}]
        def step(self, reply): return None, float(reply == "42")   # or (messages, reward) to continue

Only the episode that caused a crash or a hang fails. The other episodes of its process are repeated in a new process,
from their examples and the replies so far, and must take the same course as before.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, ClassVar

from posttrain.core.errors import RewardError, UsageError
from posttrain.rollout.foreign import split_agent, split_spec
from posttrain.sandbox.process import ProcessDiedError, ProcessLimits, ProcessRetiredError, ProcessTimeoutError
from posttrain.sandbox.supervisor import STOP_SECONDS, ProcessSupervisor, RunStoppedError, StopFlag
from posttrain.sandbox.user_code import CodeLocation, parse_location

STOPPED = "the run was asked to stop while environments were running"
SHOWN_FAILURES = 3  # different ones in a message


@dataclass(slots=True, frozen=True)
class StepResult:
    """What an environment returned for one event: the next messages, or None at the end; and the reward of the step."""

    messages: list[dict[str, Any]] | None
    reward: float
    state: str = ""  # if the environment has a method `state`: what the next reply is a reply to


@dataclass(slots=True)
class Episode:
    """One episode from the environment's side: an example, then the model's replies; one result for each of them."""

    example: dict[str, Any]
    replies: list[Any] = field(default_factory=list)  # texts, or for tools the calls of each reply
    results: list[StepResult] = field(default_factory=list)
    failure: str = ""
    number: int = -1
    process: int = -1  # index of the process that has it
    processed: int = 0  # events that the current process has handled

    @property
    def waits(self) -> bool:
        """Whether the last event has no result yet."""
        return not self.failure and len(self.results) <= len(self.replies)

    def events(self) -> list[dict[str, Any]]:
        """Return the events that the current process has not handled yet; those of a lost process with the messages."""
        events: list[dict[str, Any]] = [{"example": self.example}, *({"reply": reply} for reply in self.replies)]
        for event, result in zip(events, self.results, strict=False):
            event["known"] = result.messages
        return events[self.processed :]

    def add_result(self, reply: dict[str, Any]) -> None:
        """Store the result of the next event; an event that is repeated must have the same result as before."""
        if self.failure:
            return
        if "error" in reply:
            self.failure = reply["error"]
            return
        result = StepResult(reply["messages"], reply["reward"], reply.get("state", ""))
        if self.processed == len(self.results):
            self.results.append(result)
        elif self.results[self.processed] != result:
            self.failure = (
                "another episode ended the process of this one, and when this one was repeated, the environment "
                "returned something else: an environment must depend on its example and the replies alone"
            )
        self.processed += 1


class EnvironmentProcess:
    """Runs the episodes of one child process; when it is lost, repeats them in a new one."""

    module: ClassVar[str] = "posttrain.rollout.environment_child"

    def __init__(self, request: dict[str, Any], name: str, limits: ProcessLimits, stop_flag: StopFlag) -> None:
        """`request`: loads what runs there; `name` is used in error messages."""
        self.request, self.name, self.stop_flag = request, name, stop_flag
        self.supervisor = ProcessSupervisor(self.module, limits, stop_flag)
        self.loaded: dict[str, Any] = {}  # the reply to the request
        self.episodes: dict[int, Episode] = {}  # episodes whose objects the current process holds
        self.ended: list[int] = []  # numbers of episodes whose objects it can delete
        self.repeats = True  # whether a new process needs the earlier events of its episodes

    def load(self) -> None:
        self.loaded = self.supervisor.load(self.name, self.request)

    def advance(self, episodes: Sequence[Episode], on_result: Callable[[Episode], None] = lambda _: None) -> None:
        """Send new events to the environments; in the end each episode has its next result, or has failed.

        After a stop of the run it returns at once. `on_result` is called with episodes as soon as they have theirs.
        """
        suspect: Episode | None = None
        answered: set[int] = set()  # by number: these may have got another reply meanwhile, for the next call

        def deliver(episode: Episode) -> None:
            answered.add(episode.number)
            on_result(episode)

        def unanswered(among: Sequence[Episode]) -> list[Episode]:
            return [episode for episode in among if episode.number not in answered and episode.waits]

        while waiting := unanswered(episodes):
            repeated, sent, suspect = suspect, [suspect] if suspect else waiting, None
            try:
                self._send(sent, deliver)
                continue
            except ProcessRetiredError:
                self.stop()
                continue
            except (ProcessTimeoutError, ProcessDiedError) as error:
                reason, timed_out = str(error), isinstance(error, ProcessTimeoutError)
            except UsageError as error:  # it was loaded before: its file must have changed
                reason, timed_out, sent = str(error), False, []
            current = next(iter(unanswered(sent)), None)
            self.stop()
            if self.stop_flag.is_set():
                return  # the caller raises the reason
            if not sent:
                for episode in waiting:
                    episode.failure = episode.failure or reason
            elif current is not None and (timed_out or current is repeated):
                current.failure = reason
            else:
                suspect = current  # it may have been killed, or suffer from another episode: repeat it alone

    def _send(self, episodes: Sequence[Episode], on_result: Callable[[Episode], None]) -> None:
        self.load()
        self.episodes |= {episode.number: episode for episode in episodes}
        events = [(episode, event) for episode in episodes for event in episode.events()]
        request = {"ended": self.ended, "events": [(episode.number, event) for episode, event in events]}
        self.ended = []
        received = 0
        for reply in self.supervisor.ask(request):
            if received == len(events):
                raise ProcessDiedError("there are more replies than events")
            episode = events[received][0]
            episode.add_result(reply)
            received += 1
            if not episode.waits:
                on_result(episode)
        if received != len(events):
            raise ProcessDiedError("a reply is missing")

    def end(self, episode: Episode) -> None:
        """Delete the state of an episode, for which no event will follow."""
        if self.episodes.pop(episode.number, None) is not None:
            self.ended.append(episode.number)

    def free_ended(self) -> None:
        """Delete the state of ended episodes now, not with the next event: it may hold processes and connections."""
        if self.ended and not self.stop_flag.is_set():
            try:
                self._send([], lambda _: None)
            except (ProcessTimeoutError, ProcessDiedError, ProcessRetiredError, UsageError):
                self.stop()

    def stop(self) -> None:
        """Kill the process; the next event of each episode repeats it from its start in a new one."""
        self.supervisor.stop()
        for episode in self.episodes.values() if self.repeats else ():
            episode.processed = 0
        self.episodes.clear()
        self.ended.clear()


class Environments:
    """Runs episodes with a user's class in child processes; a context manager, which ends them."""

    process_class: ClassVar[type[EnvironmentProcess]] = EnvironmentProcess
    noun: ClassVar[str] = "episodes"

    def __init__(self, spec: str, **limits: Any) -> None:
        """`spec`: FILE.py:CLASS, package.module:CLASS, or PACKAGE:NAME of another package (rollout/foreign).

        `limits`: as `start` has them.
        """
        if split_agent(spec):
            raise UsageError(
                f"rollout.environment {spec!r} talks to the model itself: set rollout.agent {spec} instead"
            )
        foreign = split_spec(spec)
        location = CodeLocation(*foreign) if foreign else parse_location(spec, f"rollout.environment {spec!r}", "class")
        self.start(f"rollout.environment {spec}", asdict(location), **limits)

    def start(
        self,
        name: str,
        request: dict[str, Any],
        *,
        workers: int = 2,
        timeout_seconds: float = 10.0,
        memory_gib: float = 2.0,
        max_failure_rate: float = 0.1,
        env: Sequence[str] = (),
    ) -> None:
        """Make the processes; `request`: loads what runs there; `env`: environment variables that it may read."""
        self.name = name
        self.max_failure_rate = max_failure_rate
        self.stop_flag = StopFlag()
        limits = ProcessLimits(seconds=timeout_seconds, memory_gib=memory_gib, env=tuple(env))
        self.processes = [self.process_class(request, name, limits, self.stop_flag) for _ in range(workers)]
        self.numbers = itertools.count()
        self.lock = threading.Lock()  # an evaluation may run while the next batch is generated

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """Raise a UsageError if the class cannot be loaded."""
        with self.lock:
            try:
                self.processes[0].load()
            except (ProcessDiedError, ProcessTimeoutError) as error:
                raise UsageError(f"the process for environments did not start: {error}") from error

    def stop_when(self, requested: Callable[[], bool]) -> None:
        """Set the function that tells whether the run was asked to stop; `advance` then does not wait any longer."""
        self.stop_flag.stop_requested = requested

    def advance(self, episodes: Sequence[Episode], stop_seconds: float = STOP_SECONDS) -> None:
        """Give each of these episodes its next result, or a failure.

        Once a stop is requested (`stop_when`), this ends after `stop_seconds` with a RunStoppedError.
        """
        shares: dict[int, list[Episode]] = {}
        for episode in episodes:
            shares.setdefault(self.place(episode), []).append(episode)
        with self.work(stop_seconds) as threads:
            futures = [threads[index].submit(self.processes[index].advance, share) for index, share in shares.items()]
            for future in futures:
                future.result()
        if any(episode.waits for episode in episodes):
            raise RunStoppedError(STOPPED)

    @contextmanager
    def work(self, stop_seconds: float) -> Iterator[list[ThreadPoolExecutor]]:
        """Provide a thread for each process, in which its calls are made one after the other."""
        with (
            self.lock,
            ExitStack() as stack,
            self.stop_flag.work(stop_seconds),
        ):
            yield [
                stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="environments")) for _ in self.processes
            ]

    def end(self, episodes: Sequence[Episode]) -> None:
        """Free what episodes that are over hold in their processes."""
        with self.lock:
            for episode in episodes:
                if episode.process >= 0:
                    self.processes[episode.process].end(episode)
            for process in self.processes:
                process.free_ended()

    def place(self, episode: Episode, process: int | None = None) -> int:
        """Return the index of an episode's process; a new episode gets the given one, or the next."""
        if episode.number < 0:
            episode.number = next(self.numbers)
            episode.process = episode.number % len(self.processes) if process is None else process
        return episode.process

    def check_failures(self, episodes: Sequence[Episode]) -> None:
        """Raise a RewardError with the first messages if more than `max_failure_rate` of these failed."""
        failures = [episode.failure for episode in episodes if episode.failure]
        check_failure_rate(self.name, failures, len(episodes), self.max_failure_rate, self.noun)

    def close(self) -> None:
        """End all processes."""
        self.stop_flag.interrupted.set()
        with self.lock:
            for process in self.processes:
                process.stop()


def check_failure_rate(name: str, failures: Sequence[str], count: int, allowed: float, noun: str) -> None:
    """Raise a RewardError with the most frequent messages if more than the allowed share of `count` failed."""
    if len(failures) <= allowed * count:
        return
    most_frequent = Counter(failures).most_common()
    lines = [f"{name} failed in {len(failures)} of {count} {noun}; reward.max_failure_rate allows {allowed:g} of them"]
    lines += [f"{times} time{'s' * (times > 1)}:\n{text}" for text, times in most_frequent[:SHOWN_FAILURES]]
    if len(most_frequent) > SHOWN_FAILURES:
        lines.append(f"and {len(most_frequent) - SHOWN_FAILURES} other failures")
    raise RewardError("\n\n".join(lines))
