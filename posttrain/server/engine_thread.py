"""The one thread that runs the engine: answers are asked for and dropped from an event loop, and come back to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest, Sampling
from posttrain.engines.local import LocalEngine
from posttrain.engines.scheduler import ActiveRequest, BatchScheduler, TopLogprobs


@dataclass(slots=True, eq=False)
class Ticket:
    """An answer that somebody waits for. Only the event loop reads and writes it, but for `number`."""

    request: GenerationRequest
    sampling: Sampling
    changed: asyncio.Event  # set when there is news: it is over, or there are more tokens
    streamed: bool  # tokens as they come, not all at the end
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[TopLogprobs] = field(default_factory=list)
    finish: str = ""  # stop or length, when it is over; error when it will never be
    due: float = 0.0  # before this time of the event loop's clock, more tokens alone are no news
    number: int = -1  # the session's, and the engine's thread's alone


News = tuple[Ticket, list[int], list[float], list[TopLogprobs], str]
"""More of an answer, and how it ended if it did."""


class Scheduler:
    """Answers of many users at once. `submit` and `cancel` belong to the event loop."""

    def __init__(self, engine: LocalEngine, *, longest: int, answer: int) -> None:
        self.engine, self.longest, self.answer = engine, longest, answer
        self.open: set[Ticket] = set()  # promised and not yet over
        self.steps = 0
        self.running = 0  # answers in the engine's slots, as of the last step
        self.slots = 0
        self.condition = threading.Condition()
        self.inbox: list[Ticket] = []
        self.dropped: list[Ticket] = []
        self.closing = False
        self.tickets: dict[int, Ticket] = {}  # by number; this and what follows is the engine's thread's
        self.answers: dict[int, ActiveRequest] = {}
        self.news: list[News] = []

    def start(self) -> asyncio.Future[None]:
        """Runs until `close`; the future tells when, and of what it died."""
        self.loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        over = self.loop.run_in_executor(thread, self.run)
        thread.shutdown(wait=False)
        over.add_done_callback(lambda _: self.give_up())
        return over

    def submit(self, tickets: Iterable[Ticket]) -> None:
        tickets = list(tickets)
        self.open.update(tickets)
        with self.condition:
            self.inbox += tickets
            self.condition.notify()

    def cancel(self, tickets: Iterable[Ticket]) -> None:
        """Nobody waits for these any more; those that are over are left alone."""
        unwanted = [ticket for ticket in tickets if ticket in self.open]
        self.open.difference_update(unwanted)
        if unwanted:
            with self.condition:
                self.dropped += unwanted
                self.condition.notify()

    def close(self) -> None:
        with self.condition:
            self.closing = True
            self.condition.notify()

    def give_up(self) -> None:
        """No answer will come any more."""
        for ticket in self.open:
            ticket.finish = "error"
            ticket.changed.set()
        self.open.clear()

    def deliver(self, news: list[News]) -> None:
        now = self.loop.time()
        for ticket, tokens, logprobs, likeliest, finish in news:
            ticket.tokens += tokens
            ticket.logprobs += logprobs
            ticket.likeliest += likeliest
            if finish:
                ticket.finish = finish
                self.open.discard(ticket)
            if finish or now >= ticket.due:
                ticket.changed.set()

    # What follows runs in the engine's thread

    def run(self) -> None:
        with torch.inference_mode():
            session = self.engine.session(self.longest, self.answer, self.hear)
            self.slots = session.cache.slots
            while self.take(session):
                self.steps += session.busy
                ended = session.step() if session.busy else {}
                self.running = len(session.live)
                self.tell(ended)
        self.engine.sleep()

    def take(self, session: BatchScheduler) -> bool:
        """Hand over what has come in; wait for something if there is nothing to do. False: the end."""
        with self.condition:
            while not (self.inbox or self.dropped or session.busy or self.closing):
                self.condition.wait()
            asked, self.inbox = self.inbox, []
            dropped, self.dropped = self.dropped, []
        for ticket in asked:
            ticket.number = session.submit(ticket.request, ticket.sampling)
            self.tickets[ticket.number] = ticket
        for ticket in dropped:
            session.cancel(ticket.number)
            self.tickets.pop(ticket.number, None)
            self.answers.pop(ticket.number, None)
        return not self.closing

    def hear(self, answer: ActiveRequest) -> None:
        ticket = self.tickets[answer.index]
        self.answers[answer.index] = answer
        if ticket.streamed:
            self.news.append((ticket, answer.tokens[-1:], answer.logprobs[-1:], answer.top_logprobs[-1:], ""))

    def tell(self, ended: dict[int, Sample]) -> None:
        for number, sample in ended.items():
            ticket, answer = self.tickets.pop(number), self.answers.pop(number)
            rest = ([], [], []) if ticket.streamed else (answer.tokens, answer.logprobs, answer.top_logprobs)
            self.news.append((ticket, *rest, sample.finish))
        if self.news:
            news, self.news = self.news, []
            self.loop.call_soon_threadsafe(self.deliver, news)
