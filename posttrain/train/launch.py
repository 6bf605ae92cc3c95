"""Starts a training run: chooses the loop, and restarts the run from its last checkpoint after a lost worker."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.algorithms import ALGORITHMS
from posttrain.checkpoints.checkpoint import is_run_directory
from posttrain.cluster import launched, worker
from posttrain.config.parsing import from_mapping
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.errors import UsageError, WorkerError
from posttrain.train.inputs import NO_INPUTS, RunInputs
from posttrain.train.run import Result
from posttrain.train.setup import open_offline, open_online

log = logging.getLogger("posttrain")


def train(verb: str, /, **options: Any) -> Result:
    """Train like `posttrain <verb>`, from Python: options as nested dicts, as in the YAML file."""
    return train_from(verb, from_mapping(verb, ALGORITHMS[verb], options))


def refuse_in_worker() -> None:
    """Raise UsageError in a worker process, which imports the script that started it."""
    if worker.is_worker:
        raise UsageError(
            "a worker process imported the script that it was started from, and that script trains when imported. Put "
            'the call of posttrain under `if __name__ == "__main__":`'
        )


def train_from(verb: str, config: Config, inputs: RunInputs = NO_INPUTS) -> Result:
    """Train until all steps are done; restart after a lost worker, up to cluster.max_restarts times."""
    refuse_in_worker()
    if launched.is_launched_worker():
        launched.serve_controller()
        return Result(Path(config.output_dir), 0, {})
    for restarts_left in range(config.cluster.max_restarts, -1, -1):
        try:
            return run_loop(verb, config, inputs)
        except WorkerError as error:
            if not (restarts_left and error.lost and error.folder is not None):
                raise
            log.warning("%s", error)
            log.warning(
                "restarting from the last checkpoint; %d restarts left (cluster.max_restarts)", restarts_left - 1
            )
            # Before the first models were loaded there is no checkpoint, and the directory can be used again.
            config = replace(config, output_dir=str(error.folder), resume=is_run_directory(error.folder))
    raise AssertionError("the last attempt returns or raises")


def run_loop(verb: str, config: Config, inputs: RunInputs) -> Result:
    if isinstance(config, OnlineConfig):
        with open_online(verb, config, inputs) as online:
            return online.train()
    with open_offline(verb, config, inputs) as offline:
        return offline.train()
