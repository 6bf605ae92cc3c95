"""The loops. `train` runs whichever a verb needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config.sections import Config
    from posttrain.train.run import Result


def train(verb: str, /, **options: Any) -> Result:
    """`posttrain <verb>` from Python: options as nested dicts, as in the YAML file."""
    from posttrain.algorithms import ALGORITHMS
    from posttrain.config.parsing import from_mapping

    return train_from(verb, from_mapping(verb, ALGORITHMS[verb], options))


def train_from(verb: str, config: Config) -> Result:
    """Train until all steps are done. A run that lost a worker goes on from its last checkpoint if it may."""
    from posttrain.cluster import launched, worker
    from posttrain.config.sections import OnlineConfig
    from posttrain.core.errors import UsageError
    from posttrain.train import offline, online
    from posttrain.train.restart import restarting
    from posttrain.train.run import Result

    if worker.is_worker:
        raise UsageError(
            "a worker process read the script that it was started from, and that trains at once. Put the call of "
            'posttrain under `if __name__ == "__main__":`'
        )
    if launched.is_launched_worker():
        launched.serve_controller()
        return Result(Path(config.out), 0, {})
    loop: Any = online.train_from if isinstance(config, OnlineConfig) else offline.train_from
    return restarting(partial(loop, verb), config)
