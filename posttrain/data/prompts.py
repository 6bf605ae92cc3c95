"""Store the prompts of online algorithms with the interface of `ExampleStore`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from posttrain.core.types import Prompt


class PromptStore(Sequence[list[Prompt]]):
    """Examples of one prompt each, in memory, with their tokens and all columns for the reward functions."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> list[Prompt]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[Prompt]]: ...

    def __getitem__(self, index: int | slice) -> list[Prompt] | list[list[Prompt]]:
        return [[prompt] for prompt in self.prompts[index]] if isinstance(index, slice) else [self.prompts[index]]

    def hold(self) -> None:
        """Do nothing: prompts are never modified."""

    def subset(self, indices: npt.ArrayLike) -> PromptStore:
        return PromptStore([self.prompts[index] for index in np.asarray(indices, dtype=np.int64)])

    def origin(self, index: int) -> str:
        return self.prompts[index].origin

    def lengths(self) -> npt.NDArray[np.int64]:
        return np.array([len(prompt.tokens) for prompt in self.prompts], dtype=np.int64)

    def counted(self) -> int:
        """Return 0: no token of a prompt is trained on."""
        return 0

    def fingerprint(self) -> str:
        """Return a digest that changes with any token and any column, and with their order."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(len(prompt.tokens).to_bytes(8, "little") + prompt.tokens.tobytes())
            digest.update(json.dumps(prompt.columns, sort_keys=True, default=str).encode())
        return digest.hexdigest()


class PromptStoreBuilder:
    """Collects prompts one by one, as store.ExampleStoreBuilder collects samples."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []

    @property
    def count(self) -> int:
        return len(self.prompts)

    def add(self, example: Sequence[Prompt]) -> None:
        self.prompts += example

    def finish(self) -> PromptStore:
        return PromptStore(self.prompts)
