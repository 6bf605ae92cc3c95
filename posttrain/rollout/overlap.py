"""Stages of a batch that overlap: while one part is generated, the parts before it are scored and computed.

Parts are the same prompts in the same order in every run, and each stage takes them in that order: results do not
depend on timing. All stages are finished before the policy is updated, so that training stays on-policy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from posttrain.rollout.records import Rollout

PartStage = Callable[[list[Rollout]], None]
"""Computes something for the rollouts of a part and writes it into them."""


class OverlappingStages:
    """The stages that follow generation, by the devices that they use."""

    def __init__(self, stages: Mapping[str, Sequence[PartStage]], generator_place: str) -> None:
        """`stages`: place -> its stages, in order; those at `generator_place` cannot run while it generates."""
        self.between = list(stages.get(generator_place, ()))
        self.beside = {place: list(found) for place, found in stages.items() if place != generator_place and found}

    def start(self) -> RunningStages:
        """Start the threads for one batch."""
        return RunningStages(self)


class RunningStages:
    """The threads of one batch: one per place."""

    def __init__(self, stages: OverlappingStages) -> None:
        self.between = stages.between
        self.threads = [StageThread(place, found) for place, found in stages.beside.items()]

    def add(self, part: list[Rollout]) -> None:
        """Pass a part on. Stages that share the generator's devices have run when this returns."""
        for thread in self.threads:
            thread.queue.put(part)
        for stage in self.between:
            stage(part)

    def finish(self) -> None:
        """Wait until all parts went through all stages; raises the first error of a stage."""
        for thread in self.threads:
            thread.queue.put(None)
        for thread in self.threads:
            thread.join()
        for thread in self.threads:
            if thread.error is not None:
                raise thread.error

    def cancel(self) -> None:
        """Wait for the parts in progress and leave out the others."""
        for thread in self.threads:
            thread.cancelled = True
            thread.queue.put(None)
        for thread in self.threads:
            thread.join()


class StageThread(threading.Thread):
    """Runs the stages of one place, part by part."""

    def __init__(self, place: str, stages: Sequence[PartStage]) -> None:
        super().__init__(name=f"stages of {place}", daemon=True)
        self.stages = stages
        self.queue: SimpleQueue[list[Rollout] | None] = SimpleQueue()
        self.cancelled = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            while (part := self.queue.get()) is not None and not self.cancelled:
                for stage in self.stages:
                    stage(part)
        except BaseException as error:  # raised again by `finish`
            self.error = error
            if not isinstance(error, Exception):
                raise
