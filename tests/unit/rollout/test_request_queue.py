"""The queue of requests: how they are divided, and that none is lost or finished twice."""

import random
import threading

import numpy as np
import pytest

from posttrain.core.errors import WorkerError
from posttrain.engines.base import GenerationRequest
from posttrain.rollout.request_queue import RequestQueue, divide

PROMPT = np.arange(3, dtype=np.int32)


def requests(prompts, samples):
    return [GenerationRequest(prompt=PROMPT, group=group, seed=k) for group in range(prompts) for k in range(samples)]


@pytest.mark.parametrize("slots", [0, 1, 8, 100])
@pytest.mark.parametrize(("prompts", "samples", "workers"), [(64, 8, 8), (7, 3, 2), (3, 4, 8), (1, 1, 4), (10, 1, 1)])
def test_parts_cover_all_requests_in_order(prompts, samples, workers, slots):
    asked = requests(prompts, samples)
    parts = divide(asked, workers, slots)
    assert [index for part in parts for index in part.requests] == list(range(len(asked)))
    assert [request for part in parts for request in part.requests.values()] == asked
    sizes = [len(part.requests) for part in parts]
    if not slots or slots * workers >= len(asked):
        assert len(parts) == min(workers, len(asked)) and max(sizes) - min(sizes) <= samples
    else:
        assert max(sizes) <= slots and all(size <= max(1, slots / 16) for size in sizes[workers:])


def test_every_request_is_finished_once_whatever_the_workers_do():
    """Workers that are lost at random, in threads; others join."""
    chance = random.Random(0)
    for _ in range(20):
        asked = requests(12, 2)
        queue = RequestQueue(divide(asked, 3, 2), attempts=1000)
        found = []

        def work(queue, losses):
            while (part := queue.take()) is not None:
                if losses and losses.pop():
                    queue.put_back(part, WorkerError("gone", lost=True))
                else:
                    queue.finish({index: request.seed for index, request in part.requests.items()})

        plans = [[chance.random() < 0.4 for _ in range(6)] for _ in range(3)]
        threads = [threading.Thread(target=work, args=(queue, losses)) for losses in plans]
        for thread in threads:
            thread.start()
        while len(found) < len(asked):
            found += queue.take_finished(60.0).items()
        queue.close()
        for thread in threads:
            thread.join()
        assert sorted(found) == [(index, request.seed) for index, request in enumerate(asked)]


def test_a_part_that_loses_every_worker_and_an_error_end_the_wait():
    queue = RequestQueue(divide(requests(1, 1), 1), attempts=2)
    for _ in range(2):
        queue.put_back(queue.take(), WorkerError("gone", lost=True))
    assert queue.take() is None and queue.returned == 2
    with pytest.raises(WorkerError, match="workers were lost 2 times in a row during one call of generate: gone"):
        queue.take_finished(60.0)
    queue = RequestQueue(divide(requests(2, 1), 2), attempts=2)
    queue.take()
    queue.fail(ValueError("first"))
    queue.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        queue.take_finished(60.0)
