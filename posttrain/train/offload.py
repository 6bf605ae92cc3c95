"""Models that are kept in host memory while they are not used."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from posttrain.core.types import Sample
from posttrain.engines.base import GenerationRequest, OnCompletion, Sampling
from posttrain.train.learner_group import LearnerGroup

OTHERS = ("reference", "critic", "reward")  # roles that work while the policy can be away


class Offloader:
    """Moves the roles that cluster.offload names to host memory, and to the device while they are used."""

    def __init__(self, roles: Collection[str]) -> None:
        """`roles`: reference, critic, reward, optimizer (that of the policy), policy (its weights and optimizer)."""
        self.roles = roles
        self.policy: LearnerGroup | None = None  # set when it is loaded
        self.training = False  # whether the policy's optimizer is in use

    def offload(self, role: str, model: LearnerGroup) -> None:
        if role in self.roles:
            model.offload("optimizer" if role == "optimizer" else "model")

    @contextmanager
    def on_device(self, role: str, model: LearnerGroup) -> Iterator[None]:
        """Keep the model on the device within the block, and the policy away from it while another role works."""
        away = role in OTHERS and "policy" in self.roles and self.policy is not None
        before, self.training = self.training, self.training or role == "optimizer"
        if away:
            self.move_policy_away()
        if role in self.roles:
            model.onload("optimizer" if role == "optimizer" else "model")
        try:
            yield
        finally:
            self.training = before
            self.offload(role, model)
            if away:
                self.bring_policy_back()

    def move_policy_away(self) -> None:
        assert self.policy is not None
        self.policy.offload("model")  # with its optimizer

    def generator(self, policy: LearnerGroup) -> EngineBesidePolicy:
        """Return the policy's engine, which has a copy of its weights."""
        return EngineBesidePolicy(policy, self)

    def bring_policy_back(self) -> None:
        """Bring the policy back, its optimizer only if that is in use or never leaves."""
        assert self.policy is not None
        self.policy.onload("model")
        if not self.training:
            self.offload("optimizer", self.policy)


class EngineBesidePolicy:
    """Generates by an engine that has a copy of the policy's weights, while the policy itself is in host memory."""

    def __init__(self, policy: LearnerGroup, offloader: Offloader) -> None:
        self.policy, self.offloader = policy, offloader

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: Sampling, *, on_completion: OnCompletion | None = None
    ) -> list[Sample]:
        self.offloader.move_policy_away()
        try:
            return self.policy.generate(requests, sampling, on_completion=on_completion)
        finally:
            self.offloader.bring_policy_back()
