"""PyTorch, imported on first use, and types of transformers, which annotations name without importing it.

`from posttrain.core.lazy import F, torch` gives modules that load PyTorch (1.8 s of CPU time) when one of their
attributes is read for the first time. Modules that `--help` imports take it from here.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


class LazyModule(ModuleType):
    """Stands for a module until one of its attributes is read; then reads are passed on to the real one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


if TYPE_CHECKING:
    import torch as torch
    import torch.nn.functional as F
    from transformers import PreTrainedModel as PreTrainedModel
    from transformers import PreTrainedTokenizerBase as PreTrainedTokenizerBase
else:
    torch = LazyModule("torch")
    F = LazyModule("torch.nn.functional")
    PreTrainedModel = PreTrainedTokenizerBase = Any
