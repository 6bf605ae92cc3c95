"""What is sent arrives, bit for bit; a receiver that is lost does not stop the sender."""

import threading

import pytest
import torch

from posttrain.cluster.processes import RendezvousStore
from posttrain.config.sections import ModelConfig, TrainConfig
from posttrain.parallel import weight_transfer
from posttrain.parallel.weight_transfer import Rendezvous, WeightTransfer
from posttrain.train.learner import Learner
from posttrain.train.rollout_workers import WeightSender


@pytest.fixture
def rendezvous():
    store = RendezvousStore(60.0)
    found = Rendezvous(3, store.address, store.new_group_name(), 60.0)
    yield found
    assert store.store  # lives as long as the group


def together(*works):
    """Run them at once; their results."""
    results = [None] * len(works)

    def run(place, work):
        results[place] = work()

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def group(rendezvous):
    return together(*[lambda rank=rank: WeightTransfer(rendezvous, rank) for rank in range(rendezvous.size)])


WEIGHTS = {
    "half": torch.randn(3, 5, dtype=torch.bfloat16),
    "odd": torch.randint(0, 255, (7,), dtype=torch.uint8),
    "whole": torch.randn(1000),
    "turned": torch.randn(4, 6).T,
    "one": torch.tensor(3.5),
    "none": torch.zeros(0, 4),
    "long": torch.randint(-(2**60), 2**60, (2, 2)),
}


@pytest.mark.parametrize("bucket", [1, 100, 2**20])
def test_every_tensor_arrives_as_it_was(rendezvous, bucket, monkeypatch):
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", bucket)
    first, *others = group(rendezvous)
    for _ in range(2):  # the group is used again and again
        moved, *received = together(
            lambda: first.send(WEIGHTS.items()), *[lambda other=other: list(other.receive()) for other in others]
        )
        assert moved == sum(tensor.nbytes for tensor in WEIGHTS.values())
        for found in received:
            assert [name for name, _ in found] == list(WEIGHTS)
            for (name, tensor), sent in zip(found, WEIGHTS.values(), strict=True):
                assert tensor.dtype == sent.dtype and tensor.shape == sent.shape, name
                assert torch.equal(tensor, sent), name


def test_a_learner_follows_another(rendezvous):
    ahead = Learner(ModelConfig(path="pico"), TrainConfig(), seed=1)
    with torch.no_grad():
        for parameter in ahead.model.parameters():
            parameter.add_(0.01)
    behind = [Learner(ModelConfig(path="pico"), TrainConfig(), trainable=False, seed=1) for _ in range(2)]
    sender = WeightSender(ahead)
    refusal, *places = together(
        lambda: sender.connect(rendezvous), *[lambda rank=rank: WeightTransfer(rendezvous, rank) for rank in (1, 2)]
    )
    assert refusal == ""
    moved, *_ = together(sender.send, *[lambda i=i: behind[i].set_weights(places[i].receive()) for i in range(2)])
    assert moved.failure == "" and moved.bytes == sum(p.nbytes for p in dict(ahead.weights()).values())
    for learner in behind:
        for name, tensor in learner.model.state_dict().items():
            assert torch.equal(tensor, ahead.model.state_dict()[name]), name


def test_a_sender_without_receivers_says_so_and_takes_its_part(rendezvous):
    class Holder:
        device, taken = torch.device("cpu"), 0

        def weights(self):
            for name, tensor in WEIGHTS.items():
                self.taken += 1
                yield name, tensor

        def probe_logprobs(self):
            return []

    holder = Holder()
    sender = WeightSender(holder)
    hasty = Rendezvous(3, rendezvous.store, "another", 0.5)
    assert "timeout" in sender.connect(hasty)
    sender.transfer, *others = group(rendezvous)
    del others
    moved = sender.send()
    assert moved.failure and holder.taken == len(WEIGHTS), "the other ranks would wait for the rest"
