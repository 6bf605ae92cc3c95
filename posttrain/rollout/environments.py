"""Environments: a user's class that talks with the model, an object for each conversation, in child processes.

    class Game:
        def start(self, row): return [{"role": "user", "content": row["question"]}]
        def step(self, reply): return None, float(reply == "42")   # or (messages, reward), and it goes on

What misbehaves costs its own conversation. The others of its process are played again in a fresh one, from their rows
and the replies so far, and must go as they went before.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from posttrain.core.errors import RewardError, UsageError
from posttrain.rewards.process import LOAD_SECONDS, Child, DeadError, LateError, Limits, RetiredError
from posttrain.rewards.specs import MODULE, Spec

SHOWN_FAULTS = 3  # different ones in a message


@dataclass(slots=True, frozen=True)
class Outcome:
    """What an environment said to one event: messages to go on, None to end; and the reward of this step."""

    messages: list[dict[str, str]] | None
    reward: float


@dataclass(slots=True)
class Talk:
    """One conversation, as the environment sees it: a row, then replies; an outcome for each."""

    row: dict[str, Any]
    replies: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    failure: str = ""
    number: int = -1
    seen: int = 0  # events that the process of now knows of

    @property
    def waits(self) -> bool:
        """Whether something was said that the environment has not answered."""
        return not self.failure and len(self.outcomes) <= len(self.replies)

    def events(self) -> list[dict[str, Any]]:
        """All that a process must still be told."""
        told: list[dict[str, Any]] = [{"row": self.row}, *({"reply": reply} for reply in self.replies)]
        return told[self.seen :]

    def take(self, reply: dict[str, Any]) -> None:
        """The outcome of the next event; of one that is repeated it must be what it was."""
        if self.failure:
            return
        if "fault" in reply:
            self.failure = reply["fault"]
            return
        outcome = Outcome(reply["messages"], reply["reward"])
        if self.seen == len(self.outcomes):
            self.outcomes.append(outcome)
        elif self.outcomes[self.seen] != outcome:
            self.failure = (
                "its process was lost by the fault of another conversation, and when this one was repeated, the "
                "environment answered otherwise: an environment should depend on its row and the replies alone"
            )
        self.seen += 1


class Home(Child):
    """A process in which environments live."""

    module = "posttrain.rollout.environment_child"

    def load(self, spec: Spec, columns: Sequence[str] = ()) -> bool:
        """UsageError if it cannot be loaded."""
        try:
            (reply,) = self.ask({"do": "load", "spec": asdict(spec)}, LOAD_SECONDS)
        except LateError:
            raise UsageError(f"{spec.text}: loading it took more than {LOAD_SECONDS:.0f} s") from None
        except DeadError as error:
            raise UsageError(f"{spec.text}: loading it ended its process: {error}") from None
        if "fault" in reply:
            raise UsageError(f"{spec.text}: {reply['fault']}")
        return False


class Keeper:
    """Keeps the conversations of one process; a new one takes its place when it is lost."""

    def __init__(self, spec: Spec, limits: Limits, closing: threading.Event) -> None:
        self.spec, self.limits, self.closing = spec, limits, closing
        self.home: Home | None = None
        self.talks: dict[int, Talk] = {}
        self.over: list[int] = []

    def advance(self, talks: Sequence[Talk]) -> None:
        """Tell the environments what was said; in the end each has answered, or failed."""
        suspect: Talk | None = None
        while waiting := [talk for talk in talks if talk.waits]:
            asked, suspect = [suspect] if suspect else waiting, None
            late = False
            try:
                self.tell(asked)
                continue
            except RetiredError:
                self.stop()
                continue
            except LateError:
                reason, late = f"no answer within {self.limits.seconds:g} s{self.last_words()}", True
            except DeadError as error:
                reason = str(error)
            except UsageError as error:  # it was loaded before: its file must have changed
                reason, asked = str(error), []
            culprit = next((talk for talk in asked if talk.waits), None)
            alone = len(self.talks) <= 1
            self.stop()
            if not asked or self.closing.is_set():
                for talk in waiting:
                    talk.failure = talk.failure or reason
            elif culprit is not None and (late or alone):
                culprit.failure = reason
            else:
                suspect = culprit  # what another one left behind may be the cause: ask by itself, in a fresh process

    def tell(self, talks: Sequence[Talk]) -> None:
        home = self.ready()
        self.talks |= {talk.number: talk for talk in talks}
        events = [(talk, event) for talk in talks for event in talk.events()]
        message = {"do": "go on", "over": self.over, "events": [(talk.number, event) for talk, event in events]}
        self.over = []
        answered = 0
        for reply in home.ask(message, self.limits.seconds):
            if "retire" in reply:
                raise RetiredError
            if answered == len(events):
                raise DeadError("too many replies")
            events[answered][0].take(reply)
            answered += 1
        if answered != len(events):
            raise DeadError("a reply is missing")

    def ready(self) -> Home:
        if self.home is None:
            self.home = Home(self.limits, self.closing)
            try:
                self.home.load(self.spec)
            except UsageError:
                self.stop()
                raise
        return self.home

    def last_words(self) -> str:
        return self.home.tail() if self.home is not None else ""

    def end(self, talk: Talk) -> None:
        """Nothing will be said in it any more."""
        if self.talks.pop(talk.number, None) is not None:
            self.over.append(talk.number)

    def stop(self) -> None:
        """End the process. What is told next begins from the start."""
        home, self.home = self.home, None
        if home is not None:
            home.kill()
        for talk in self.talks.values():
            talk.seen = 0
        self.talks.clear()
        self.over.clear()


class Environments:
    """Conversations with a user's class; start it as a context manager, which ends the processes."""

    def __init__(
        self,
        spec: str,
        *,
        workers: int = 2,
        timeout_seconds: float = 10.0,
        memory_gib: float = 2.0,
        max_failure_rate: float = 0.1,
    ) -> None:
        self.spec = parse_environment(spec)
        self.max_failure_rate = max_failure_rate
        self.closing = threading.Event()
        limits = Limits(seconds=timeout_seconds, memory_gib=memory_gib)
        self.keepers = [Keeper(self.spec, limits, self.closing) for _ in range(workers)]
        self.numbers = itertools.count()
        self.lock = threading.Lock()  # an evaluation may play while the next batch is made

    def __enter__(self) -> Environments:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self) -> None:
        """UsageError if the class cannot be loaded."""
        with self.lock:
            try:
                self.keepers[0].ready()
            except (DeadError, LateError) as error:
                raise UsageError(f"the process for environments did not start: {error}") from error

    def advance(self, talks: Sequence[Talk]) -> None:
        """Each of these gets its next outcome, or a failure."""
        for talk in talks:
            talk.number = next(self.numbers) if talk.number < 0 else talk.number
        shares = [[talk for talk in talks if self.keeper_of(talk) is keeper] for keeper in self.keepers]
        with self.lock, ThreadPoolExecutor(len(self.keepers), thread_name_prefix="environments") as threads:
            try:
                for future in [
                    threads.submit(keeper.advance, share)
                    for keeper, share in zip(self.keepers, shares, strict=True)
                    if share
                ]:
                    future.result()
            except BaseException:
                self.closing.set()  # interrupted: nobody waits for an environment any more
                raise

    def end(self, talks: Sequence[Talk]) -> None:
        """These are over, and need no memory any more."""
        with self.lock:
            for talk in talks:
                self.keeper_of(talk).end(talk)

    def keeper_of(self, talk: Talk) -> Keeper:
        return self.keepers[talk.number % len(self.keepers)]

    def check_failures(self, talks: Sequence[Talk]) -> None:
        """RewardError with the first texts if more than `max_failure_rate` of these failed."""
        failures = [talk.failure for talk in talks if talk.failure]
        if len(failures) <= self.max_failure_rate * len(talks):
            return
        faults = Counter(failures).most_common()
        lines = [
            f"{self.spec.text} failed in {len(failures)} of {len(talks)} conversations, more than "
            f"rewards.limits allows: {self.max_failure_rate:g} of them"
        ]
        lines += [f"{times} time{'s' * (times > 1)}:\n{text}" for text, times in faults[:SHOWN_FAULTS]]
        if len(faults) > SHOWN_FAULTS:
            lines.append(f"and {len(faults) - SHOWN_FAULTS} other faults")
        raise RewardError("\n\n".join(lines))

    def close(self) -> None:
        """End all processes."""
        self.closing.set()
        with self.lock:
            for keeper in self.keepers:
                keeper.stop()


def parse_environment(text: str) -> Spec:
    """`FILE.py:CLASS` or `package.module:CLASS`; UsageError if there is no such file."""
    place, _, name = text.rpartition(":")
    where = f"rollout.environment {text!r}"
    if not place or not name.isidentifier():
        raise UsageError(f"{where}: write FILE.py:CLASS or package.module:CLASS")
    if not place.endswith(".py"):
        if not MODULE.fullmatch(place):
            raise UsageError(f"{where}: {place!r} is neither a file that ends in .py nor a module")
    elif not Path(place).is_file():
        raise UsageError(f"{where}: there is no file {place}")
    else:
        place = str(Path(place).absolute())
    return Spec(text=f"rollout.environment {text}", kind="function", name="environment", place=place, function=name)
