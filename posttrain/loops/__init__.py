"""The loops. `train` runs whichever a verb needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config import Config
    from posttrain.loops.run import Result


def train(verb: str, /, **options: Any) -> Result:
    """`posttrain <verb>` from Python: options as nested dicts, as in the YAML file."""
    from posttrain.algos import ALGORITHMS
    from posttrain.config import from_mapping

    return train_from(verb, from_mapping(verb, ALGORITHMS[verb], options))


def train_from(verb: str, config: Config) -> Result:
    """Train until all steps are done."""
    from posttrain.config import OnlineConfig
    from posttrain.loops import offline, online

    return online.train_from(verb, config) if isinstance(config, OnlineConfig) else offline.train_from(verb, config)
