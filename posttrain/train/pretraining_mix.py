"""Texts whose loss is mixed into a policy's, so that it does not forget how to write."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.algorithms import OnlineAlgorithm
from posttrain.config.sections import DataConfig
from posttrain.core.errors import DataError
from posttrain.core.types import ForwardRequest, Objective
from posttrain.data.dataset import Encoder, ExampleStream, load_dataset
from posttrain.data.reading.mixture import split_weights
from posttrain.train.run import Run
from posttrain.train.update import Besides


class Pretraining:
    """PPO's mix-in: the loss of plain text or conversations, added to every step (arXiv:2203.02155, eq. 2)."""

    def __init__(self, run: Run, algo: OnlineAlgorithm) -> None:
        names, weights = split_weights(algo.pretrain_files())
        parts: list[tuple[tuple[str, ...], float]] = (
            [((name,), weight) for name, weight in zip(names, weights, strict=True)] if weights else []
        )
        self.streams, self.objectives = [], []
        for files, weight in parts or [(tuple(names), 1.0)]:
            data = replace(run.config.data, train=files, eval=(), map_keys="")
            rows = max(1, run.config.update.rows_per_step // max(1, len(parts)))
            self.streams.append(ExampleStream(load_rows(files, data, run.tokenizer), rows, run.config.seed))
            loss = partial(algo.pretrain_loss, weight=weight)
            self.objectives.append(Objective(request=ForwardRequest(), loss=loss, unit="token", separable=True))

    @property
    def position(self) -> list[int]:
        return [stream.position for stream in self.streams]

    @position.setter
    def position(self, values: list[int]) -> None:
        for stream, value in zip(self.streams, values, strict=True):
            stream.position = value

    def take(self) -> list[Besides]:
        """A step's texts of each source, with their weight in the loss."""
        return [Besides(s.take(), objective) for s, objective in zip(self.streams, self.objectives, strict=True)]


def load_rows(files: tuple[str, ...], data: DataConfig, tokenizer: Any) -> Any:
    """Text if the files have it, else conversations; if they have neither, what is wrong with the text."""
    try:
        return load_dataset(files, Encoder(tokenizer, data, "text", len(tokenizer))).rows
    except DataError as not_text:
        try:
            return load_dataset(files, Encoder(tokenizer, data, "chat", len(tokenizer))).rows
        except DataError:
            raise not_text from None
