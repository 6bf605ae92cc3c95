"""A rollout worker that waits for new weights at a known step; lives in a worker process."""

import time

from posttrain.train.rollout_workers import RolloutWorker


class Pausing(RolloutWorker):
    """After so many steps of a call it says that it is under way, and goes on when somebody wants the model."""

    def __init__(self, steps, folder, *args):
        super().__init__(*args)
        self.steps, self.folder = steps, folder

    def generate(self, requests, sampling):
        self.seen = 0
        return super().generate(requests, sampling)

    def pause(self):
        if self.seen == self.steps:
            (self.folder / "under way").touch()
            until = time.monotonic() + 120
            while self.turns.begun == self.turns.ended and time.monotonic() < until:
                time.sleep(0.01)
        self.seen += 1
        return super().pause()
