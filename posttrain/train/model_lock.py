"""Lets weight updates run between the decode steps of a model that generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class ModelLock:
    """Alternates between generation and weight updates, which use one model. Updates run between decode steps.

    Updates are counted and made by one thread. Processes that hold a model together must stop at the same step: they
    agree on how many updates run before the next one.
    """

    def __init__(self, agree: Callable[[int], int] = lambda number: number) -> None:
        """`agree`: returns the largest of the numbers that these processes pass, each in its turn."""
        self.agree = agree
        self.changed = threading.Condition()
        self.generating = False
        self.requested = self.finished = self.admitted = 0  # updates; up to `admitted` may run during generation
        self.incomplete = False  # an update failed halfway: another one must run before the next step

    @contextmanager
    def generate(self) -> Iterator[None]:
        """Hold the model for decode steps; updates wait for `let_updates_run`."""
        with self.changed:
            self.generating = True
        try:
            self.let_updates_run()
            yield
        finally:
            with self.changed:
                self.generating = False
                self.changed.notify_all()

    def let_updates_run(self) -> None:
        """Let all requested updates run now; returns at once if there are none."""
        while True:
            with self.changed:
                missing = self.incomplete and self.requested == self.finished
                wanted = self.requested + missing
            number = self.agree(wanted)
            if number == self.admitted:
                return
            with self.changed:
                self.admitted = number
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.finished >= self.admitted)

    @contextmanager
    def update(self) -> Iterator[None]:
        """Hold the model for an update; waits until no decode step runs."""
        with self.changed:
            self.requested += 1
            self.changed.wait_for(lambda: not self.generating or self.requested <= self.admitted)
        try:
            yield
        finally:
            with self.changed:
                self.finished += 1
                self.changed.notify_all()


def agree_by_all_reduce() -> Callable[[int], int]:
    """Return a function that gives the largest of the numbers that all processes of the default group pass."""
    group = torch.distributed.new_group(backend="gloo")  # a group of its own: the default one is in use meanwhile

    def agree(number: int) -> int:
        largest = torch.tensor(number)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        return int(largest)

    return agree
