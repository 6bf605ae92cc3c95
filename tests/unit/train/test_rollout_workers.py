"""Rollout workers: no request of a lost worker is lost or generated twice."""

import random
import threading
import time
from functools import partial

import numpy as np
import pytest

from posttrain.cluster.local import LocalPool
from posttrain.cluster.processes import ProcessPool, RendezvousStore
from posttrain.cluster.worker_slots import WorkerSlot
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError, WorkerError
from posttrain.core.types import Sample
from posttrain.engines.base import LOCAL, GenerationRequest, Sampling, check_samples
from posttrain.parallel.weight_transfer import Rendezvous
from posttrain.train.learner import Learner
from posttrain.train.model_lock import ModelLock
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers
from tests.unit.cluster.things import FakeRolloutWorker, FakeWeightSender, NumberedRequest

SECONDS = 60.0


def rendezvous(store, size):
    return Rendezvous(size, store.address, store.new_group_name(), SECONDS)


@pytest.fixture
def workers(tmp_path):
    made, store = [], RendezvousStore(SECONDS)

    def slot(number, processes):
        def make():
            made.append(number)
            first = number * processes
            return ProcessPool(
                processes, tmp_path / "logs", timeout_seconds=SECONDS, rendezvous=store, first_number=first
            )

        return WorkerSlot(make, lambda pool: pool.start("rollout", FakeRolloutWorker, tmp_path))

    found = []

    def build(count, processes=1, **how):
        sender = LocalPool().start("sender", FakeWeightSender)
        slots = [slot(i, processes) for i in range(count)]
        found.append(RolloutWorkers(slots, sender, partial(rendezvous, store), **how))
        found[-1].made = made
        return found[-1]

    yield build
    for group in found:
        group.close()


REQUESTS = [NumberedRequest(number) for number in range(11)]


def asked(folder):
    return sorted(int(line) for line in (folder / "asked").read_text().split())


def test_samples_come_in_order_with_the_newest_weights(workers, tmp_path):
    group = workers(2)
    for version in range(2):
        group.update(version)
        assert group.generate(REQUESTS, None) == [(request, version) for request in REQUESTS]
    assert group.last_transfer.bytes == 20 and sorted(group.made) == [0, 1]
    assert group.generate(REQUESTS[:1], None) == [(0, 1)], "fewer requests than workers"


@pytest.mark.parametrize("how", ["kill", "stop", "hang"])
def test_a_worker_that_is_lost_during_generation(workers, tmp_path, how, caplog):
    group = workers(2)
    group.update(0)
    pool = group.slots[0].pool
    pool.timeout_seconds = SECONDS if how == "kill" else 2.0
    (tmp_path / f"generate-of-{pool.channels[0].process.pid}-{how}").touch()
    (tmp_path / "slow").touch()  # so that the other one does not take all parts
    found = []
    work = threading.Thread(target=lambda: found.extend(group.generate(REQUESTS, None)))
    work.start()
    until = time.monotonic() + SECONDS
    while not group.lost:
        assert work.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    (tmp_path / "slow").unlink()
    work.join(SECONDS)
    assert found == [(request, 0) for request in REQUESTS], "by the other, with its weights"
    assert asked(tmp_path) == REQUESTS, "each once"
    assert "rollout worker, rank 0" in caplog.text and "the worker is replaced" in caplog.text
    assert group.lost == 1 and group.returned_requests in (5, 6), "its share of eleven requests"
    assert len(group.made) == 2 and len(group.ready) == 1
    group.update(1)  # does not wait for a new one
    assert group.generate(REQUESTS, None) == [(request, 1) for request in REQUESTS]
    wait_for_new_workers(group)
    group.update(2)
    assert len(group.made) == 3 and len(group.ready) == 2, "it has joined"
    assert group.generate(REQUESTS, None) == [(request, 2) for request in REQUESTS]


@pytest.mark.parametrize("how", ["", "kill", "raise"])
def test_workers_with_few_slots_take_more_when_they_have_room(workers, tmp_path, how):
    group = workers(2, slots_per_worker=3)
    group.update(0)
    if how == "kill":
        (tmp_path / f"advance-of-{group.slots[1].pool.channels[0].process.pid}-kill").touch()
    if how == "raise":
        (tmp_path / "advance-raise").touch()
        with pytest.raises(WorkerError, match="7 rows, but 8 are expected"):
            group.generate(REQUESTS, None)
        (tmp_path / "advance-raise").unlink()
        return
    for _ in range(2):
        assert group.generate(REQUESTS, None) == [(request, 0) for request in REQUESTS]
    assert asked(tmp_path) == sorted(REQUESTS * 2), "each once in each batch"
    assert group.lost == (how == "kill") and group.returned_requests <= 3 * group.lost


def test_requests_that_are_added_later_have_the_same_completions():
    """Real engines with three slots each; completions have different lengths."""
    rng = np.random.default_rng(0)
    requests = [
        GenerationRequest(
            prompt=rng.integers(10, 200, 3 + group).astype(np.int32), group=group, seed=seed, token_limit=1 + 3 * seed
        )
        for group in range(5)
        for seed in range(4)
    ]
    sampling = Sampling(max_tokens=20)
    expected = Learner(ModelConfig(path="pico"), TrainConfig(), trainable=False, seed=0).generate(requests, sampling)
    start = partial(LocalPool.start, role="rollout", factory=RolloutWorker, **PICO_WORKER)
    slots = [WorkerSlot(LocalPool, start) for _ in range(2)]
    group = RolloutWorkers(slots, None, lambda size: size, slots_per_worker=3)
    for slot in slots:
        slot.has_weights = True
    for _ in range(2):
        reported = {}
        found = group.generate(requests, sampling, on_completion=reported.__setitem__)
        assert [reported[index] for index in range(20)] == found
        for one, other in zip(found, expected, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.group == other.group
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


PICO_WORKER = {"model": ModelConfig(path="pico"), "engine": LOCAL, "template": "", "seed": 0}


def wait_for_new_workers(group):
    for slot in group.slots:
        if slot.starting is not None:
            slot.starting.join(SECONDS)


def test_a_run_goes_on_without_a_worker_that_cannot_be_replaced(workers, tmp_path, caplog):
    group = workers(2)
    group.update(0)
    group.slots[1].pool.channels[0].process.kill()
    assert group.generate(REQUESTS, None) == [(request, 0) for request in REQUESTS]
    (tmp_path / "start-raise").touch()
    for version in (1, 2):
        group.update(version)
        wait_for_new_workers(group)
        assert group.generate(REQUESTS, None) == [(request, version) for request in REQUESTS]
        assert group.ready == group.slots[:1]
    assert caplog.text.count("could not be replaced, and the run goes on with the others") == 2
    (tmp_path / "start-raise").unlink()
    group.update(3)
    wait_for_new_workers(group)
    group.update(4)
    assert group.ready == group.slots, "it joins when it can be started again"


def test_requests_that_lose_every_worker_end_the_run(workers, tmp_path):
    group = workers(1)
    group.update(0)
    for number in range(9):
        (tmp_path / f"generate-{number}-kill").touch()
    with pytest.raises(WorkerError, match="workers were lost 3 times in a row during one call of generate") as failed:
        group.generate(REQUESTS[:1], None)
    assert failed.value.lost and group.lost == 3


def test_the_only_worker_is_replaced_at_once(workers, tmp_path):
    group = workers(1)
    group.update(0)
    (tmp_path / "generate-kill").touch()
    assert group.generate(REQUESTS, None) == [(request, 0) for request in REQUESTS], "the same weights again"
    assert asked(tmp_path) == REQUESTS and group.made == [0, 0]


@pytest.mark.parametrize("moment", ["connect", "receive", "check"])
def test_a_worker_that_is_lost_during_a_weight_update(workers, tmp_path, moment):
    group = workers(2)
    (tmp_path / f"{moment}-kill").touch()
    group.update(0)
    answers = group.generate(REQUESTS, None)
    assert [request for request, _ in answers] == REQUESTS
    assert {version for _, version in answers} == {group.version}, "all have the same weights"


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_that_is_lost_while_it_says_which_parts_it_needs(workers, tmp_path, count):
    """Engines of two processes each."""
    group = workers(count, processes=2)
    (tmp_path / "needed_parts-kill").touch()
    group.update(0)
    assert group.lost == 1 and group.receivers == count - (count > 1), "the other is not waited for"
    assert group.generate(REQUESTS, None) == [(request, 0) for request in REQUESTS]


def test_weights_that_a_worker_dropped_are_sent_again(workers, tmp_path):
    """Weights of neighbouring steps differ less than the probe shows: the worker's version tells."""
    group = workers(2)
    group.update(0)
    (tmp_path / "dropped-1").touch()
    group.update(1)
    assert group.generate(REQUESTS, None) == [(request, 1) for request in REQUESTS]
    assert len(group.made) == 2, "none was replaced"


@pytest.mark.parametrize("moment", ["connect", "receive", "check", "generate"])
def test_a_worker_that_fails_is_not_replaced(workers, tmp_path, moment):
    group = workers(2)
    (tmp_path / f"{moment}-raise").touch()
    with pytest.raises(WorkerError, match=r"rollout worker, rank 0 .* 7 rows, but 8 are expected") as failed:
        group.update(0)
        group.generate(REQUESTS, None)
    assert not failed.value.lost, "the run is not restarted"
    assert len(group.made) == 2


PROMPT = np.array([5, 6, 7], dtype=np.int32)


def sample(tokens=(5, 6, 7, 1, 2), mask=(0, 0, 0, 1, 1), logprobs=(0, 0, 0, -1, -2)):
    return Sample(
        tokens=np.array(tokens, dtype=np.int32),
        mask=np.array(mask, dtype=np.bool_),
        logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        ([], "0 samples for 1 requests"),
        ([sample(tokens=(5, 6, 7, 1, 10))], "token id 10 is not in the vocabulary of 10"),
        ([sample(tokens=(5, 6, 7, -1, 2))], "token id -1 is not in"),
        ([sample(tokens=(5, 6, 8, 1, 2))], "does not begin with the prompt"),
        ([sample((5, 6, 7), (0, 0, 0), (0, 0, 0))], "it has 0 tokens, of at most 2"),
        ([sample((5, 6, 7, 1, 2, 3), (0, 0, 0, 1, 1, 1), (0, 0, 0, -1, -2, -3))], "it has 3 tokens, of at most 2"),
        ([sample(mask=(0, 0, 0, 1, 0))], "mask"),
        ([sample(logprobs=(0, 0, 0, -1, float("nan")))], "log-probabilities are not finite"),
        ([sample(logprobs=None)], "log-probabilities are not finite"),
    ],
)
def test_garbage_of_an_engine_is_not_trained_on(garbage, words):
    class Engine:
        def generate(self, requests, sampling):
            return garbage

    def samples_of(generated):
        garbage[:] = generated
        check = partial(check_samples, vocabulary=10, engine="a rollout worker")
        slot = WorkerSlot(LocalPool, lambda pool: pool.start("rollout", Engine))
        group = RolloutWorkers([slot], None, lambda size: size, check)
        slot.has_weights = True
        return group.generate([GenerationRequest(prompt=PROMPT, group=4)], Sampling(max_tokens=2))

    with pytest.raises(PosttrainError, match=f"a rollout worker returned .*{words}"):
        samples_of(list(garbage))
    assert len(samples_of([sample()])) == 1


def test_it_gives_up_after_three_attempts(workers, tmp_path):
    group = workers(1)
    for number in range(9):
        (tmp_path / f"receive-{number}-kill").touch()
    with pytest.raises(WorkerError, match=r"did not reach the rollout workers in 3 attempts: .*SIGKILL"):
        group.update(0)


def test_a_worker_that_is_lost_during_generation_and_a_weight_update(workers, tmp_path):
    """Two threads notice at once; the worker is replaced once, and its requests are sent again."""
    group = workers(2)
    group.update(0)
    (tmp_path / "slow").touch()
    found = []
    work = threading.Thread(target=lambda: found.extend(group.generate(REQUESTS, None)))
    work.start()
    until = time.monotonic() + SECONDS
    while len(list(tmp_path.glob("under-way-*"))) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    (tmp_path / "receive-kill").touch()
    group.update(1)
    (tmp_path / "slow").unlink()
    work.join(SECONDS)
    assert found == [(request, 1) for request in REQUESTS]
    assert asked(tmp_path) == REQUESTS and group.lost == 1


def test_the_group_is_formed_once(workers, tmp_path):
    group = workers(2)
    for version in range(3):
        group.update(version)
    assert sorted((tmp_path / "met").read_text().split()) == ["1", "2"]


def test_weights_that_did_not_arrive_end_the_run(workers, tmp_path):
    group = workers(2)
    group.update(6)
    (tmp_path / "differs-7").touch()
    with pytest.raises(
        PosttrainError, match=r"rollout worker 0 of 2: after the update to version 7 .* by 0\.5 on average"
    ):
        group.update(7)


def test_updates_run_between_decode_steps():
    lock, story = ModelLock(), []

    def visitor(number, half):
        with lock.update():
            lock.incomplete = half
            story.append(f"visit {number}")

    with lock.generate():
        story.append("step 1")
        visits = threading.Thread(target=lambda: [visitor(1, True), visitor(2, False)])
        visits.start()
        while not lock.requested:
            time.sleep(0.01)
        assert story == ["step 1"], "it waits until the step is over"
        lock.let_updates_run()  # the first leaves half an update behind, so the next step waits for the second
        story.append("step 2")
    visits.join()
    assert story == ["step 1", "visit 1", "visit 2", "step 2"]


def test_processes_that_share_a_model_let_updates_run_at_the_same_step():
    """Updates and steps both need all processes at once, as a broadcast and a tensor-parallel layer do."""
    ranks, calls, visits, steps = 3, 6, 40, 7
    given, meeting = [0] * ranks, threading.Barrier(ranks, timeout=SECONDS)
    together = {"visit": threading.Barrier(ranks, timeout=SECONDS), "step": threading.Barrier(ranks, timeout=SECONDS)}
    stories = [[] for _ in range(ranks)]

    def agree(rank, number):
        given[rank] = number
        meeting.wait()
        largest = max(given)
        meeting.wait()
        return largest

    def work(rank, lock):
        for call in range(calls):
            with lock.generate():
                for step in range(steps):
                    lock.let_updates_run()
                    together["step"].wait()
                    stories[rank].append((call, step))

    def come(rank, lock):
        wait = random.Random(rank)
        for visit in range(visits):
            time.sleep(wait.random() / 200)  # each at a time of its own
            with lock.update():
                together["visit"].wait()
                lock.incomplete = rank == 1 and visit % 5 == 3
                stories[rank].append(visit)

    threads = []
    for rank in range(ranks):
        lock = ModelLock(partial(agree, rank))
        threads += [threading.Thread(target=task, args=(rank, lock), daemon=True) for task in (work, come)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert len(stories[0]) == calls * steps + visits
    during = [[one for one in story if story.index(one) < story.index((calls - 1, steps - 1))] for story in stories]
    assert during[0] == during[1] == during[2], "in the same order for all"
