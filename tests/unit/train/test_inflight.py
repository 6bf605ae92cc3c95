"""Real rollout workers: weight updates during generation, and weights that do not arrive as sent."""

import threading
import time

import numpy as np
import pytest
import torch

from posttrain.cluster.local import LocalPool
from posttrain.cluster.processes import ProcessPool, RendezvousStore
from posttrain.cluster.worker_host import RoleRef
from posttrain.cluster.worker_slots import WorkerSlot
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.core.errors import PosttrainError
from posttrain.engines.base import LOCAL, GenerationRequest, Sampling
from posttrain.parallel.weight_transfer import Rendezvous
from posttrain.train.learner import Learner
from posttrain.train.rollout_workers import RolloutWorkers, WeightSender
from tests.unit.train.pausing import Pausing

SECONDS = 120.0
STEPS = 15  # before the weights change
PICO = ModelConfig(path="pico")
SAMPLING = Sampling(max_tokens=40)
REQUESTS = [GenerationRequest(prompt=np.arange(5, 5 + length, dtype=np.int32), seed=length) for length in (4, 7, 9)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A learner in this process, and a rollout worker in another."""
    folder = tmp_path_factory.mktemp("inflight")
    here = LocalPool()
    here.start("actor", Learner, PICO, TrainConfig(), seed=1)
    sender = here.start("sender", WeightSender, RoleRef("actor"))
    store = RendezvousStore(SECONDS)

    def make():
        return ProcessPool(1, folder / "logs", timeout_seconds=SECONDS, rendezvous=store)

    def start(pool):
        return pool.start("rollout", Pausing, STEPS, folder, PICO, LOCAL, "", 1, True)

    workers = RolloutWorkers(
        [WorkerSlot(make, start)], sender, lambda size: Rendezvous(size, store.address, store.new_group_name(), SECONDS)
    )
    yield folder, here.host.objects["actor"], workers
    workers.close()


def change(learner):
    """Behind the last attention: keys and values, which stay, are then the same by both weights."""
    layer = learner.model.model.layers[-1]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (layer.mlp.down_proj.weight, learner.model.lm_head.weight):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_active_requests_continue_with_new_weights(place):
    folder, learner, workers = place
    workers.update(3)
    found = []
    work = threading.Thread(target=lambda: found.extend(workers.generate(REQUESTS, SAMPLING)))
    work.start()
    until = time.monotonic() + SECONDS
    while not (folder / "under way").exists():
        assert work.is_alive() and time.monotonic() < until
        time.sleep(0.01)
    old = Learner(PICO, TrainConfig(), trainable=False, seed=1)
    old.set_weights(learner.weights())
    change(learner)
    workers.update(4)
    work.join(SECONDS)
    assert [(sample.version, sample.newest) for sample in found] == [(3, 4)] * len(REQUESTS)
    by_old, by_new = old.logprobs(found), learner.logprobs(found)
    for sample, was, now in zip(found, by_old, by_new, strict=True):
        first, rest = np.split(np.flatnonzero(sample.mask), [STEPS])
        assert len(first) == STEPS and len(rest) > STEPS
        np.testing.assert_allclose(sample.logprobs[first], was[first], atol=1e-5)
        np.testing.assert_allclose(sample.logprobs[rest], now[rest], atol=1e-5)
        assert np.abs(was - now)[sample.mask].mean() > 0.1


def test_a_tensor_that_breaks_on_the_way_ends_the_run(place, monkeypatch):
    _, learner, workers = place
    workers.update(8)
    whole = learner.weights

    def broken():
        for name, tensor in whole():
            yield name, tensor * 0.5 if name == "model.layers.2.mlp.down_proj.weight" else tensor

    monkeypatch.setattr(learner, "weights", broken)
    with pytest.raises(
        PosttrainError, match=r"rollout worker 0 of 1: after the update to version 9 .* differ .* by 0\.\d"
    ):
        workers.update(9)
    monkeypatch.undo()
    workers.update(10)
