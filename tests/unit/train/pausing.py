"""A rollout worker that waits for new weights at a known step; lives in a worker process."""

import time

from posttrain.train.rollout_workers import RolloutWorker


class Pausing(RolloutWorker):
    """After `steps` steps of a call it creates a file and waits until a weight update is requested."""

    def __init__(self, steps, folder, *args):
        super().__init__(*args)
        self.steps, self.folder = steps, folder

    def generate(self, requests, sampling):
        self.seen = 0
        return super().generate(requests, sampling)

    def between_steps(self):
        if self.seen == self.steps:
            (self.folder / "under way").touch()
            until = time.monotonic() + 120
            while self.lock.requested == self.lock.finished and time.monotonic() < until:
                time.sleep(0.01)
        self.seen += 1
        return super().between_steps()
