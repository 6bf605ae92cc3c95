"""A run that lost a worker starts again by itself, from its last checkpoint, as often as it may."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from posttrain.checkpoints.checkpoint import is_run_directory
from posttrain.core.errors import WorkerError

if TYPE_CHECKING:
    from posttrain.config.sections import Config
    from posttrain.train.run import Result

log = logging.getLogger("posttrain")


def restarting(train: Callable[[Config], Result], config: Config) -> Result:
    """Train; after a lost worker again, up to cluster.limits[0] times."""
    for left in range(config.cluster.limits[0], -1, -1):
        try:
            return train(config)
        except WorkerError as error:
            if not (left and error.lost and error.folder is not None):
                raise
            log.warning("%s", error)
            log.warning("starting again from the last checkpoint; %d more of cluster.limits left", left - 1)
            # Before the first models were loaded there is nothing to go on from, and the folder is free.
            config = replace(config, out=str(error.folder), resume=is_run_directory(error.folder))
    raise AssertionError("the last try returns or raises")
