"""Which parts leave the device, and when; tests/unit/parallel/test_fsdp.py moves them on a GPU."""

import pytest

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import from_mapping
from posttrain.core.errors import UsageError
from posttrain.train.offload import Offloader
from posttrain.train.setup import engine_has_copy


class Recorder:
    """Stands for the learners of a role: where its parts are is all that an Offloader changes (a CPU has one place)."""

    def __init__(self):
        self.away = set()

    def offload(self, part):
        self.away |= {part, "optimizer"}  # as Learner.move: the optimizer goes with the model

    def onload(self, part):
        self.away -= {part, "optimizer"}


def opened(*roles):
    offloader, policy, other = Offloader(roles), Recorder(), Recorder()
    offloader.policy = policy
    offloader.offload("reference", other)
    offloader.offload("optimizer", policy)
    return offloader, policy, other


def test_the_policy_is_away_while_others_work():
    offloader, policy, reference = opened("policy", "reference")
    assert reference.away and not policy.away
    with offloader.on_device("reference", reference):
        assert not reference.away and policy.away == {"model", "optimizer"}
    assert reference.away and not policy.away


def test_its_optimizer_comes_back_only_to_train():
    offloader, policy, critic = opened("policy", "optimizer")
    assert policy.away == {"optimizer"}
    with offloader.on_device("critic", critic):
        assert policy.away == {"model", "optimizer"}
    assert policy.away == {"optimizer"}
    with offloader.on_device("optimizer", policy):
        with offloader.on_device("critic", critic):
            assert policy.away == {"model", "optimizer"}
        assert not policy.away  # the policy is updated next
    assert policy.away == {"optimizer"}


def test_the_policy_is_away_while_an_engine_generates_with_a_copy():
    offloader, policy, _ = opened("policy", "optimizer")
    seen = []

    def generate(requests, sampling, on_completion=None):
        seen.append(set(policy.away))
        return requests

    policy.generate = generate
    assert offloader.generator(policy).generate(["a"], None) == ["a"]
    assert seen == [{"model", "optimizer"}] and policy.away == {"optimizer"}  # the optimizer waits for the update


def test_an_engine_with_the_policys_own_weights_keeps_them_on_the_device():
    def config(**more):
        options = {"model.path": "pico", "data.train": ["x.jsonl"], "reward": ["gsm8k"]}
        return from_mapping("grpo", ALGORITHMS["grpo"], options | more)

    assert not engine_has_copy(config())
    assert engine_has_copy(config(**{"rollout.engine": "vllm"})) and engine_has_copy(config(**{"cluster.devices": 2}))


def test_without_the_option_it_stays_also_after_an_error():
    offloader, policy, reference = opened("reference")
    with pytest.raises(KeyError), offloader.on_device("reference", reference):
        assert not policy.away
        raise KeyError
    assert reference.away


def test_a_policy_that_trains_meanwhile_cannot_leave():
    options = {"model.path": "pico", "data.train": ["x.jsonl"], "reward": ["gsm8k"], "rollout.ahead": 1}
    with pytest.raises(UsageError, match="leave out one of them"):
        from_mapping("grpo", ALGORITHMS["grpo"], options | {"cluster.offload": ["policy"]})
    with pytest.raises(UsageError, match="offline training has no phase without"):
        from_mapping(
            "sft", ALGORITHMS["sft"], {"model.path": "pico", "data.train": ["x"], "cluster.offload": ["engine"]}
        )
