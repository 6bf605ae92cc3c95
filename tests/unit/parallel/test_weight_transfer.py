"""What is sent arrives, bit for bit; a receiver that is lost does not stop the sender."""

import threading

import pytest
import torch

from posttrain.cluster.placement import Placement
from posttrain.cluster.processes import RendezvousStore
from posttrain.cluster.worker_host import RoleRef
from posttrain.config.sections import ModelConfig, OnlineClusterConfig, TrainConfig
from posttrain.engines.base import LOCAL
from posttrain.parallel.weight_transfer import (
    MAX_GROUPS,
    Rendezvous,
    TransferGroup,
    WeightTransfer,
    plan_groups,
    receive_from_all,
    send_to_all,
)
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
            lambda: send_to_all([first], WEIGHTS.items(), bucket),
            *[lambda other=other: list(receive_from_all([other])) for other in others],
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
    senders = [lambda n=n, group=group: WeightTransfer(group, 0, turn=n, turns=3) for n, group in enumerate(groups)]
    receivers = [lambda rank=rank: [WeightTransfer(group, rank) for group in groups] for rank in (1, 2)]
    found = together(*senders, *receivers)
    return found[:3], found[3:]


@pytest.mark.parametrize("bucket", [1, 100, 2**20])  # as many buckets as tensors, three, one
def test_several_senders_send_every_tensor_once(groups, bucket):
    senders, receivers = join_all(groups)
    for _ in range(2):
        sends = [lambda sender=sender: send_to_all([sender], WEIGHTS.items(), bucket) for sender in senders]
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

    sends = [lambda sender=sender: send_to_all([sender], WEIGHTS.items(), 1) for sender in senders]
    *moved, first, second = together(*sends, *[lambda each=each: receive(each) for each in receivers])
    assert (first, second) == ("noticed", "noticed")
    assert None not in moved, "they have sent everything"


@pytest.mark.parametrize(("learners", "parts"), [(1, 1), (3, 1), (512, 1), (1, 4), (3, 4), (6, 4), (512, 16)])
def test_channels_cover_every_bucket_of_every_part(learners, parts):
    groups = plan_groups(learners, parts, lambda: None)
    for part in range(parts):
        own = [group for group in groups if group.part == part]
        assert sorted(group.turn for group in own) == list(range(len(own)))
        assert {group.turns for group in own} == {len(own)} and 0 < len(own) <= MAX_GROUPS
    sent = [sum(group.sender == learner for group in groups) for learner in range(learners)]
    assert max(sent) == -(-parts // learners), "a learner has several parts only if there are too few learners"
    assert min(learners, MAX_GROUPS * parts) == sum(count > 0 for count in sent), "all send"


def halves(number):
    """What one of two processes needs: half of the columns or rows of some tensors, none of others, or whole ones."""

    found = {
        name: tuple(
            (size * number // 2, size * (number + 1) // 2) if i == 0 else (0, size)
            for i, size in enumerate(tensor.shape)
        )
        for name, tensor in WEIGHTS.items()
    }
    found["turned"] = ((0, 6), (2 * number, 2 * number + 2))
    del found["odd" if number else "long"]
    return found


@pytest.mark.parametrize("learners", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 100, 2**20])
def test_each_process_of_an_engine_gets_its_part_and_nothing_else(learners, bucket):
    """Two engines of two processes each."""
    store = RendezvousStore(60.0)
    groups = plan_groups(learners, 2, lambda: Rendezvous(3, store.address, store.new_group_name(), 60.0))
    parts = [halves(0), halves(1)]

    def join_and_send(learner):
        own = [group for group in groups if group.sender == learner]
        joined = [WeightTransfer(c.rendezvous, 0, turn=c.turn, turns=c.turns, parts=parts[c.part]) for c in own]
        return [send_to_all(joined, WEIGHTS.items(), bucket) for _ in range(2)]

    def join_and_receive(engine, part):
        joined = [WeightTransfer(c.rendezvous, 1 + engine) for c in groups if c.part == part]
        return [list(receive_from_all(joined)) for _ in range(2)]

    places = [(engine, part) for engine in range(2) for part in range(2)]
    works = [lambda learner=learner: join_and_send(learner) for learner in range(learners)]
    works += [lambda place=place: join_and_receive(*place) for place in places]
    found = together(*works)
    for (_, part), rounds in zip(places, found[learners:], strict=True):
        for received in rounds:
            assert [name for name, _ in received] == [name for name in WEIGHTS if name in parts[part]]
            for name, tensor in received:
                assert torch.equal(tensor, WEIGHTS[name][tuple(slice(*bounds) for bounds in parts[part][name])]), name
    needed = sum(tensor.nbytes for received in found[learners : learners + 2] for _, tensor in received[0])
    assert sum(sent[0] for sent in found[:learners]) == needed, "each part is sent once, to both engines"
    assert store.store


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
        lambda: sender.connect([TransferGroup(rendezvous, 0)], []),
        *[lambda rank=rank: WeightTransfer(rendezvous, rank) for rank in (1, 2)],
    )
    assert refusal == ""
    moved, *_ = together(
        sender.send, *[lambda i=i: behind[i].set_weights(receive_from_all([places[i]])) for i in range(2)]
    )
    assert moved.failure == "" and moved.bytes == sum(p.nbytes for p in dict(ahead.weights()).values())
    for learner in behind:
        for name, tensor in learner.model.state_dict().items():
            assert torch.equal(tensor, ahead.model.state_dict()[name]), name


def test_who_waits_for_a_lost_process_is_told_at_once(rendezvous):
    """Long before the limit of 60 s: the controller calls give_up when it has lost one."""

    def join(rank):
        with pytest.raises(RuntimeError) as raised:
            WeightTransfer(rendezvous, rank)
        return str(raised.value)

    assert together(lambda: join(0), lambda: join(2), lambda: rendezvous.give_up("rank 1 is lost"))[:2] == [
        "rank 1 is lost",
        "rank 1 is lost",
    ]


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
    assert "timeout" in sender.connect([TransferGroup(hasty, 0)], [])
    first, *others = group(rendezvous)
    sender.transfers = [first]
    del others
    moved = sender.send()
    assert moved.failure and holder.taken == len(WEIGHTS), "the other ranks would wait for the rest"
