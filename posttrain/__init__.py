"""posttrain: everything after pretraining.

Every verb of the command line is a function here, with the same options as nested dicts:

    import posttrain
    result = posttrain.sft(model={"path": "pico"}, data={"train": ["rows.jsonl"]}, steps=20)
"""

from __future__ import annotations

from functools import partial
from typing import Any

__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    from posttrain.algorithms import ALGORITHMS  # light: does not load PyTorch

    if name in ("GRPOTrainer", "PPOTrainer"):
        from posttrain import trainers

        return getattr(trainers, name)
    if name in ALGORITHMS:
        from posttrain.train.launch import train

        return partial(train, name)
    raise AttributeError(f"module 'posttrain' has no attribute {name!r}")
