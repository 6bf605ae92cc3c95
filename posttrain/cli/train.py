"""The training verbs."""

from __future__ import annotations

from posttrain.algorithms import ALGORITHMS
from posttrain.config import parsing
from posttrain.config.checks import launched_size
from posttrain.config.sections import Config
from posttrain.core.imports import importing_libraries

OUTPUT_DIR = ("--output_dir", "--output-dir", "--out")


def run(verb: str, args: list[str]) -> int:
    """Train; return 0 when all steps are done."""
    if launched_size() > 1:
        from posttrain.cluster import launched

        if launched.is_launched_worker():  # started by torchrun or srun: only rank 0 reads the options
            launched.serve_controller()
            return 0
    config = read(verb, args)
    start_workers_importing(config)
    with importing_libraries():
        from posttrain.train.launch import train_from

    train_from(verb, config)
    return 0


def start_workers_importing(config: Config) -> None:
    """Let the process that workers are forked from import the libraries now, beside this one, to start sooner."""
    if config.cluster.devices == 1 or config.cluster.ray_address or launched_size() > 1:
        return
    from posttrain.cluster.processes import start_importing
    from posttrain.train import WORKER_MODULES

    start_importing(config.cluster.devices, WORKER_MODULES)


def read(verb: str, args: list[str], *, data: bool = True) -> Config:
    """Read the options; --resume without a file reads the run's config.yaml. `data`: whether data is required."""
    algorithm = ALGORITHMS[verb]
    if "--resume" in args and args[0].startswith("-"):
        from posttrain.train.run_directory import find_run

        file = find_run(option(args, *OUTPUT_DIR), verb) / "config.yaml"
        args = [str(file), *args]
    config = parsing.parse(verb, algorithm, args, data=data)
    algorithm(config.algo)  # checks its options
    return config


def option(args: list[str], *names: str) -> str:
    """Return the value of an option before parsing; empty if it is not there."""
    for index, argument in enumerate(args):
        name, separator, value = argument.partition("=")
        if name in names and (separator or index + 1 < len(args)):
            return value if separator else args[index + 1]
    return ""
