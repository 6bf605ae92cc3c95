"""Slots for workers that are replaced when they are lost, and the retry of the calls that a lost worker had."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.cluster.base import PendingCall, Pool, Workers
from posttrain.core.errors import PosttrainError, WorkerError

ATTEMPTS = 3  # of an operation, each with a new worker in place of one that was lost

log = logging.getLogger("posttrain")


class WorkerSlot:
    """The position of one worker (a pool of its own), which may hold a different worker over time."""

    def __init__(self, make_pool: Callable[[], Pool], start_role: Callable[[Pool], Workers]) -> None:
        self.make_pool, self.start_role = make_pool, start_role
        self.pool: Pool | None = None
        self.workers: Workers | None = None
        self.has_weights = False  # whether the worker has received weights, where it has to
        self.starting: threading.Thread | None = None  # starts a worker, which is not in the slot yet
        self.closing = threading.Lock()
        self.closed = 0  # how often: a worker that is being started then is not needed any more

    def start(self) -> None:
        """Start a worker, if the slot has none; waits for one that is being started in the background."""
        if self.starting is not None:
            self.starting.join()
        if self.workers is None:
            self.pool = self.make_pool()
            self.workers = self.start_role(self.pool)

    def start_in_background(self, wait_until_ready: Callable[[Workers], None]) -> None:
        """Start a worker without waiting for it; the slot has it once `wait_until_ready` returns.

        If that fails, the slot stays empty, and the log says why.
        """
        if self.workers is None and (self.starting is None or not self.starting.is_alive()):
            self.starting = threading.Thread(
                target=self.start_and_wait, args=(wait_until_ready, self.closed), name="slot", daemon=True
            )
            self.starting.start()

    def start_and_wait(self, wait_until_ready: Callable[[Workers], None], closed: int) -> None:
        try:
            pool = self.make_pool()
            with self.closing:
                if self.closed != closed:
                    pool.close()
                    return
                self.pool = pool
            workers = self.start_role(pool)
            wait_until_ready(workers)
        except PosttrainError as error:
            if self.closed == closed:
                log.warning("a worker could not be replaced, and the run goes on with the others: %s", error)
                self.close()
            return
        with self.closing:
            self.workers = workers if self.closed == closed else None

    def close(self) -> None:
        """End the worker; the slot is empty then."""
        with self.closing:
            self.closed += 1
            pool, self.pool, self.workers, self.has_weights = self.pool, None, None, False
        if pool is not None:
            pool.close()

    def submit(self, method: str, *args: Any) -> PendingCall:
        assert self.workers is not None, "no worker assigned"
        try:
            return self.workers.submit(method, *args)
        except WorkerError as error:  # another thread has found the worker lost
            return FailedCall(error)


class FailedCall:
    """A call that could not be sent."""

    def __init__(self, error: WorkerError) -> None:
        self.error = error

    def result(self) -> list[Any]:
        raise self.error


class SlotCall:
    """A call to the worker in a slot, which can be sent again."""

    def __init__(self, slot: WorkerSlot, method: str, args: tuple[Any, ...]) -> None:
        self.method, self.args = method, args
        self.send(slot)

    def send(self, slot: WorkerSlot) -> None:
        self.slot, self.workers = slot, slot.workers
        self.pending = slot.submit(self.method, *self.args)


class ReplaceableWorkers:
    """Workers in slots. A call to a worker that is lost is sent again, to the same slot or to another.

    The calls must not depend on the worker that runs them: a generation request carries its own seed, so its
    completion is the same on every worker.
    """

    def __init__(self, slots: Sequence[WorkerSlot]) -> None:
        self.slots = list(slots)
        self.lost = 0  # workers so far
        self.lock = threading.RLock()  # held while workers are replaced or their weights change
        self.start()

    def start(self) -> None:
        """Start a worker in every empty slot, in parallel: loading an engine takes long."""
        with ThreadPoolExecutor(len(self.slots), thread_name_prefix="slots") as starting:
            for started in [starting.submit(slot.start) for slot in self.slots]:
                started.result()

    def result(self, call: SlotCall) -> Any:
        """Wait for a call; if its worker is lost the call is sent again, up to ATTEMPTS times in all."""
        lost = 0
        while True:
            try:
                return call.pending.result()[0]
            except WorkerError as error:
                lost += 1
                if error.lost and lost == ATTEMPTS:
                    message = f"workers were lost {lost} times in a row during one call of {call.method}: {error}"
                    raise WorkerError(message, lost=True) from error
                with self.lock:
                    self.discard(call.slot, call.workers, error)
                    call.send(self.slot_for_retry(call.slot))

    def discard(self, slot: WorkerSlot, workers: Workers | None, error: WorkerError) -> None:
        """Empty the slot of a lost worker, unless another thread has done so already.

        Raises the error if the worker failed without being lost: a new worker would fail in the same way.
        """
        if not error.lost:
            raise error
        with self.lock:
            if slot.workers is not workers:
                return
            log.warning("%s", error)
            log.warning("the worker is replaced and its requests are sent again")
            self.lost += 1
            slot.close()

    def slot_for_retry(self, slot: WorkerSlot) -> WorkerSlot:
        """Choose the slot that runs the calls of a worker that was lost: the same one, with a new worker."""
        slot.start()
        return slot

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
