"""What is sent arrives, bit for bit; a receiver that is lost does not stop the sender."""

import threading

import pytest
import torch

from posttrain.cluster.placement import Placement
from posttrain.cluster.processes import RendezvousStore
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import ModelConfig, OnlineClusterConfig, TrainConfig
from posttrain.engines.base import LOCAL
from posttrain.parallel.weight_transfer import Rendezvous, WeightTransfer, receive_from_all
from posttrain.train.learner import Learner
from posttrain.train.rollout_workers import RolloutWorker, RolloutWorkers, WeightSender


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
def test_every_tensor_arrives_as_it_was(rendezvous, bucket):
    first, *others = group(rendezvous)
    for _ in range(2):  # the group is used again and again
        moved, *received = together(
            lambda: first.send(WEIGHTS.items(), bucket_bytes=bucket),
            *[lambda other=other: list(other.receive()) for other in others],
        )
        assert moved == sum(tensor.nbytes for tensor in WEIGHTS.values())
        for found in received:
            assert [name for name, _ in found] == list(WEIGHTS)
            for (name, tensor), sent in zip(found, WEIGHTS.values(), strict=True):
                assert tensor.dtype == sent.dtype and tensor.shape == sent.shape, name
                assert torch.equal(tensor, sent), name


@pytest.fixture
def groups():
    """A group for each of three senders, with two receivers."""
    store = RendezvousStore(60.0)
    yield [Rendezvous(3, store.address, store.new_group_name(), 60.0) for _ in range(3)]
    assert store.store


def join_all(groups):
    senders = [lambda group=group: WeightTransfer(group, 0) for group in groups]
    receivers = [lambda rank=rank: [WeightTransfer(group, rank) for group in groups] for rank in (1, 2)]
    found = together(*senders, *receivers)
    return found[:3], found[3:]


@pytest.mark.parametrize("bucket", [1, 100, 2**20])  # as many buckets as tensors, three, one
def test_several_senders_send_every_tensor_once(groups, bucket):
    senders, receivers = join_all(groups)
    for _ in range(2):
        sends = [
            lambda n=n, sender=sender: sender.send(WEIGHTS.items(), n, 3, bucket) for n, sender in enumerate(senders)
        ]
        receives = [lambda each=each: list(receive_from_all(each)) for each in receivers]
        *moved, first, second = together(*sends, *receives)
        assert sum(moved) == sum(tensor.nbytes for tensor in WEIGHTS.values())
        assert (0 in moved) == (bucket == 2**20), "each has its share"
        for found in (first, second):
            assert [name for name, _ in found] == list(WEIGHTS), "in the order of the learners"
            assert all(torch.equal(tensor, WEIGHTS[name]) for name, tensor in found)


def test_a_sender_that_is_lost_does_not_stop_the_others(groups):
    senders, receivers = join_all(groups)
    lost = senders.pop()
    del lost  # closes its connections

    def receive(each):
        with pytest.raises(RuntimeError):
            list(receive_from_all(each))
        return "noticed"

    sends = [lambda n=n, sender=sender: sender.send(WEIGHTS.items(), n, 3, 1) for n, sender in enumerate(senders)]
    *moved, first, second = together(*sends, *[lambda each=each: receive(each) for each in receivers])
    assert (first, second) == ("noticed", "noticed")
    assert None not in moved, "they have sent everything"


def test_the_ranks_of_a_sharded_learner_all_send(tmp_path):
    places = Placement(OnlineClusterConfig(devices=3, worker_timeout_seconds=200.0, rollout_devices=1), tmp_path)
    try:
        actor, model = places.pool("actor"), ModelConfig(path="pico")
        actor.start("actor", Learner, model, TrainConfig(), trainable=False, seed=3)
        sender = actor.start("sender", WeightSender, RoleRef("actor"), 2**20)
        slots = places.rollout_slots(lambda pool: pool.start("rollout", RolloutWorker, model, LOCAL, "", 7))
        workers = RolloutWorkers(slots, sender, places.rendezvous)
        for version in range(2):
            workers.update(version)  # compares log-probabilities
        sent = [result.bytes for result in sent_by(sender, workers)]
        assert min(sent) > 0 and sum(sent) == workers.last_transfer.bytes
    finally:
        places.close()


def sent_by(sender, workers):
    receiving = [slot.submit("receive", 2) for slot in workers.slots]
    results = sender.call("send")
    assert [call.result() for call in receiving] == [[""]]
    return results


def test_a_learner_follows_another(rendezvous):
    ahead = Learner(ModelConfig(path="pico"), TrainConfig(), seed=1)
    with torch.no_grad():
        for parameter in ahead.model.parameters():
            parameter.add_(0.01)
    behind = [Learner(ModelConfig(path="pico"), TrainConfig(), trainable=False, seed=1) for _ in range(2)]
    sender = WeightSender(ahead)
    refusal, *places = together(
        lambda: sender.connect([rendezvous]), *[lambda rank=rank: WeightTransfer(rendezvous, rank) for rank in (1, 2)]
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
    assert "timeout" in sender.connect([hasty])
    sender.transfer, *others = group(rendezvous)
    del others
    moved = sender.send()
    assert moved.failure and holder.taken == len(WEIGHTS), "the other ranks would wait for the rest"
