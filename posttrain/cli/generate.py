"""`posttrain generate MODEL DATA ... --output_file completions.jsonl`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from posttrain.cli.arguments import data_of, engine_of, model_of
from posttrain.config.sections import ClusterConfig
from posttrain.config.tools import (
    ConditionArgs,
    EngineArgs,
    LoadArgs,
    PromptArgs,
    SamplingArgs,
    SpeculativeArgs,
    ToolArgs,
    positional,
    read_tool,
    required,
)
from posttrain.config.verbs import TOOLS
from posttrain.core.errors import UsageError
from posttrain.core.imports import importing_libraries


@dataclass(kw_only=True)
class GenerateArgs(PromptArgs, LoadArgs, EngineArgs, SpeculativeArgs, ConditionArgs, SamplingArgs, ToolArgs):
    """Options of `posttrain generate`."""

    verb: ClassVar[str] = "generate"
    about: ClassVar[str] = TOOLS["generate"]
    example: ClassVar[str] = "posttrain generate MODEL prompts.jsonl --output_file completions.jsonl"

    model: str = positional()
    """Model directory, Hugging Face name, run directory (newest valid checkpoint) or `pico`, a toy model."""
    data: tuple[str, ...] = positional(())
    """Files, directories, globs or dataset names with prompts."""
    output_file: str = required()
    """Required. The .jsonl file to write, one line per completion."""
    samples_per_prompt: int = 1
    """Completions per prompt."""
    seed: int = 0
    """The same seed gives the same completions."""
    window_size: int = 0
    """Use only one part of this many prompts, chosen by window_index; 0: all prompts."""
    window_index: int = 1
    """Which part of window_size prompts to use, from 1: with 2048 and 3 the third 2,048 prompts."""
    resume: bool = False
    """Continue an output file that is not complete."""
    quiet: bool = False
    """Print only warnings, errors and the last line."""


ARGS = (GenerateArgs,)


def run(args: list[str]) -> int:
    """Generate; 0 if all completions are in the file."""
    options = read_tool(GenerateArgs(), args)
    window = window_of(options)
    from posttrain.core.logging import quiet_libraries
    from posttrain.core.progress import ProgressDisplay

    quiet_libraries()
    with importing_libraries():
        from posttrain.engines.base import Sampling
        from posttrain.inference.generate import Generation, generate, manifest_of
        from posttrain.inference.model import CONDITION

    config = Generation(
        model=model_of(options.model, options),
        data=data_of(options, options.data),
        out=options.output_file,
        sampling=Sampling.of(options),
        n=options.samples_per_prompt,
        seed=options.seed,
        window=window,
        condition=options.condition,
        condition_template=options.condition_template or CONDITION,
        batch=options.batch_size,
        engine=engine_of(options),
        cluster=ClusterConfig(devices=options.devices),
        resume=options.resume,
    )
    try:
        with ProgressDisplay(stream=sys.stderr, quiet=options.quiet, seconds_between_lines=10) as display:
            progress = generate(config, lambda progress: progress.show_on(display))
    except KeyboardInterrupt:
        print(
            f"stopped; finished completions are in {config.out}. To continue, add --resume to the same command",
            file=sys.stderr,
        )
        raise
    generated = progress.done - progress.resumed
    for reason, count in progress.left_out.items():
        where = f"; they are in {config.out}.quarantine.jsonl" if reason == "quarantined" else ""
        print(f"{count:,} example{'s' * (count > 1)} of the data {reason}{where}", file=sys.stderr)
    already = f" ({progress.resumed:,} more were in the file)" if progress.resumed else ""
    print(f"done: {generated:,} completions{already} in {config.out}; settings in {manifest_of(Path(config.out)).name}")
    return 0


def window_of(options: GenerateArgs) -> tuple[int, int] | None:
    if not options.window_size and options.window_index != 1:
        raise UsageError(f"window_index is {options.window_index}, but window_size is not set.")
    return (options.window_index, options.window_size) if options.window_size else None
