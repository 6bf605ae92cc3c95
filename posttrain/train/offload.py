"""Models that are kept in host memory while they are not used."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from posttrain.train.learner_group import LearnerGroup


class Offloader:
    """Moves the roles that cluster.offload names to host memory, and to the device while they are used."""

    def __init__(self, roles: Collection[str]) -> None:
        """`roles`: reference, critic, reward, optimizer (that of the policy)."""
        self.roles = roles

    def offload(self, role: str, model: LearnerGroup) -> None:
        if role in self.roles:
            model.offload("optimizer" if role == "optimizer" else "model")

    @contextmanager
    def on_device(self, role: str, model: LearnerGroup) -> Iterator[None]:
        """Keeps the model on the device within the block."""
        if role in self.roles:
            model.onload("optimizer" if role == "optimizer" else "model")
        try:
            yield
        finally:
            self.offload(role, model)
