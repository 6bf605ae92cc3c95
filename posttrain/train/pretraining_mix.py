"""Texts whose loss is added to the policy's, so that it keeps its language modelling ability (PPO-ptx)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.algorithms import OnlineAlgorithm
from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.core.types import ForwardRequest, Objective
from posttrain.data.dataset import Encoder, ExampleStream, load_dataset
from posttrain.train.run import Run
from posttrain.train.update import AuxiliaryLoss


class PretrainingMix:
    """Yields the loss of plain text or conversations that is added to every step (arXiv:2203.02155, eq. 2)."""

    def __init__(self, run: Run, algorithm: OnlineAlgorithm) -> None:
        sources = algorithm.pretrain_sources()
        self.streams, self.objectives = [], []
        for files, weight in sources:
            data = replace(run.config.data, train=files, eval=(), map_keys={})
            size = max(1, run.config.train.batch_size // len(sources))
            self.streams.append(ExampleStream(load_examples(files, data, run.tokenizer), size, run.config.seed))
            loss = partial(algorithm.pretrain_loss, weight=weight)
            self.objectives.append(Objective(request=ForwardRequest(), loss=loss, unit="token", separable=True))

    @property
    def position(self) -> list[int]:
        return [stream.position for stream in self.streams]

    @position.setter
    def position(self, values: list[int]) -> None:
        for stream, value in zip(self.streams, values, strict=True):
            stream.position = value

    def next_losses(self) -> list[AuxiliaryLoss]:
        """Return the texts of the next step, by source, each with its objective."""
        return [AuxiliaryLoss(s.take(), objective) for s, objective in zip(self.streams, self.objectives, strict=True)]


def load_examples(files: tuple[str, ...], data: DataConfig, tokenizer: Any) -> Any:
    """Read texts, or else conversations; if the files hold neither, the error is about texts."""
    try:
        return load_dataset(files, Encoder(tokenizer, data, "text", len(tokenizer))).examples
    except DataError as not_text:
        try:
            return load_dataset(files, Encoder(tokenizer, data, "chat", len(tokenizer))).examples
        except DataError:
            raise not_text from None
