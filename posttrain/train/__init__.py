"""The loops. `train` runs whichever a verb needs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.config import Config
    from posttrain.loops.run import Result


def train(verb: str, /, **options: Any) -> Result:
    """`posttrain <verb>` from Python: options as nested dicts, as in the YAML file."""
    from posttrain.algos import ALGORITHMS
    from posttrain.options import from_mapping

    return train_from(verb, from_mapping(verb, ALGORITHMS[verb], options))


def train_from(verb: str, config: Config) -> Result:
    """Train until all steps are done. A run that lost a worker goes on from its last checkpoint if it may."""
    from posttrain.config import OnlineConfig
    from posttrain.errors import UsageError
    from posttrain.loops import offline, online
    from posttrain.loops.restart import restarting
    from posttrain.loops.run import Result
    from posttrain.runtime import launched, worker

    if worker.is_worker:
        raise UsageError(
            "a worker process read the script that it was started from, and that trains at once. Put the call of "
            'posttrain under `if __name__ == "__main__":`'
        )
    if launched.is_follower():
        launched.follow()
        return Result(Path(config.out), 0, {})
    loop: Any = online.train_from if isinstance(config, OnlineConfig) else offline.train_from
    return restarting(partial(loop, verb), config)
