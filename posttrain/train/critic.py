"""The critic of PPO, where it is a model of its own."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.algorithms.base import CriticSettings
from posttrain.core.types import ForwardRequest, Objective, Sample
from posttrain.train.learner_group import LearnerGroup
from posttrain.train.offload import Offloader


class Critic:
    """A value model: a score head on a trunk of its own, trained beside the policy."""

    def __init__(self, model: LearnerGroup, settings: CriticSettings, offloader: Offloader, router_loss: float) -> None:
        self.model, self.offloader, self.learning_rate = model, offloader, settings.learning_rate
        offloader.offload("critic", model)
        request = ForwardRequest(names=frozenset({"values"}), router_loss=router_loss)
        self.objective = Objective(request=request, loss=settings.loss, unit="token")

    def fill(self, samples: Sequence[Sample]) -> None:
        """Write the critic's values into the samples."""
        with self.offloader.on_device("critic", self.model):
            fill_values(self.model, samples)


def fill_values(model: LearnerGroup, samples: Sequence[Sample]) -> None:
    for sample, values in zip(samples, model.values(samples), strict=True):
        sample.values = values
