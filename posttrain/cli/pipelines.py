"""The pipelines: `posttrain rejection-sampling`, `iterative-dpo`, `conditional-sft`."""

from __future__ import annotations

from posttrain.cli.train import OUTPUT_DIR, option
from posttrain.core.imports import importing_libraries


def run(verb: str, args: list[str]) -> int:
    """Run a pipeline; return 0 when all iterations are done. --resume without a file reads the run's config.yaml."""
    from posttrain.core.logging import quiet_libraries

    quiet_libraries()
    with importing_libraries():
        from posttrain.pipelines.recipes import run_from
        from posttrain.pipelines.settings import parse_pipeline

    if "--resume" in args and args[0].startswith("-"):
        from posttrain.train.run_directory import find_run

        folder = find_run(option(args, *OUTPUT_DIR), verb)
        args = [str(folder / "config.yaml"), *args, "--output_dir", str(folder)]
    run_from(verb, parse_pipeline(verb, args))
    return 0
