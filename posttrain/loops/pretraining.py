"""Texts whose loss is mixed into a policy's, so that it does not forget how to write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from posttrain.config import DataConfig
from posttrain.data.dataset import Encoder, RowStream, load_dataset
from posttrain.errors import DataError
from posttrain.loops.run import Run
from posttrain.loops.update import Besides
from posttrain.types import Objective, Request


class Pretraining:
    """PPO's mix-in: the loss of plain text or conversations, added to every step (arXiv:2203.02155, eq. 2)."""

    def __init__(self, run: Run) -> None:
        algo: Any = run.algo
        files = algo.pretrain_files()
        data = replace(run.config.data, train=files, eval=(), map_keys="")
        self.stream = RowStream(load_rows(files, data, run.tokenizer), run.config.update.rows_per_step, run.config.seed)
        self.objective = Objective(request=Request(), loss=algo.pretrain_loss, unit="token")

    @property
    def position(self) -> int:
        return self.stream.position

    @position.setter
    def position(self, value: int) -> None:
        self.stream.position = value

    def take(self) -> Besides:
        return Besides(self.stream.take(), self.objective)


def load_rows(files: tuple[str, ...], data: DataConfig, tokenizer: Any) -> Any:
    """Text if the files have it, else conversations; if they have neither, what is wrong with the text."""
    try:
        return load_dataset(files, Encoder(tokenizer, data, "text", len(tokenizer))).rows
    except DataError as not_text:
        try:
            return load_dataset(files, Encoder(tokenizer, data, "chat", len(tokenizer))).rows
        except DataError:
            raise not_text from None
