"""Prompts as rows: what online algorithms take instead of samples, with the same questions answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from posttrain.core.types import Prompt


class PromptStore(Sequence[list[Prompt]]):
    """Rows of one prompt each, in memory: beside their tokens they carry all columns for the reward functions."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, row: int) -> list[Prompt]: ...

    @overload
    def __getitem__(self, row: slice) -> list[list[Prompt]]: ...

    def __getitem__(self, row: int | slice) -> list[Prompt] | list[list[Prompt]]:
        return [[prompt] for prompt in self.prompts[row]] if isinstance(row, slice) else [self.prompts[row]]

    def hold(self) -> None:
        """Prompts are never written into."""

    def subset(self, rows: npt.ArrayLike) -> PromptStore:
        return PromptStore([self.prompts[row] for row in np.asarray(rows, dtype=np.int64)])

    def origin(self, row: int) -> str:
        return self.prompts[row].origin

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(prompt.tokens) for prompt in self.prompts], dtype=np.int64)

    def counted(self) -> int:
        """No token of a prompt counts: the policy did not choose it."""
        return 0

    def fingerprint(self) -> str:
        """Changes with any token and any column, and with their order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(len(prompt.tokens).to_bytes(8, "little") + prompt.tokens.tobytes())
            digest.update(json.dumps(prompt.columns, sort_keys=True, default=str).encode())
        return digest.hexdigest()


class PromptStoreBuilder:
    """Takes prompts one by one, as store.ExampleStoreBuilder takes samples."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    @property
    def rows(self) -> int:
        return len(self.prompts)

    def add(self, row: Sequence[Prompt]) -> None:
        self.prompts += row

    def finish(self) -> PromptStore:
        return PromptStore(self.prompts)
