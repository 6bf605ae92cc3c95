"""`posttrain plan [VERB] [CONFIG.yaml] [--section.option value ...]`: batches, memory and time of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from posttrain.algorithms import ALGORITHMS
from posttrain.config.parsing import verb_of_file
from posttrain.config.tools import ToolArgs, check_at_least, read_own_options
from posttrain.config.verbs import PIPELINES, TOOLS
from posttrain.core.errors import UsageError
from posttrain.core.imports import importing_libraries


@dataclass(kw_only=True)
class PlanArgs(ToolArgs):
    """Options of `posttrain plan` besides those of the verb that it plans."""

    verb: ClassVar[str] = "plan"
    about: ClassVar[str] = TOOLS["plan"]
    example: ClassVar[str] = "posttrain plan sft --model pico --data examples/data/chat.jsonl --device_gib 80"
    usage: ClassVar[str] = "posttrain plan [VERB] [CONFIG.yaml] [--section.option value ...]"

    device_gib: float = 0.0
    """Memory of one device in GiB, to plan for accelerators that this machine does not have; 0: this machine's."""
    device: Literal["", "a100", "b200", "h100", "h20", "h200", "h800", "l40s", "mi300x"] = ""
    """Accelerator to plan memory and time of a step for, by its published rates; empty: this machine's."""
    devices_per_machine: int = 8
    """Devices of one machine, which fast links connect; between machines each has a network port of its own."""
    completion_tokens: int = 0
    """Mean length of completions to plan the time of an online step for; 0: rollout.max_tokens."""
    search: bool = False
    """Search all layouts and divisions of cluster.devices among roles; print the three with the shortest steps."""


ARGS = (PlanArgs,)
MORE = "VERB may be left out if the file has a line like `verb: sft`. posttrain VERB --help lists the other options."


def run(args: list[str]) -> int:
    """Print the plan."""
    options, words, rest = read_own_options(PlanArgs(), args, MORE)
    check_at_least(options, device_gib=0, devices_per_machine=1, completion_tokens=0)
    verb, words = planned_verb(words)
    if verb in PIPELINES:
        from posttrain.cli.plan_pipeline import plan_pipeline
        from posttrain.pipelines.settings import parse_pipeline

        if options.device or options.search:
            raise UsageError(f"posttrain plan {verb}: --device and --search are for single trainers; leave them out.")
        return plan_pipeline(verb, parse_pipeline(verb, [*words, *rest]), options.device_gib)
    with importing_libraries():
        from posttrain.cli.plan_search import search_layouts
        from posttrain.cli.plan_training import Target, plan_training
    from posttrain.cli.train import read

    target = Target.of(options.device, options.device_gib, options.devices_per_machine, options.completion_tokens)
    config = read(verb, [*words, *rest], data=False)
    return search_layouts(verb, config, target) if options.search else plan_training(verb, config, target=target)


def planned_verb(words: list[str]) -> tuple[str, list[str]]:
    """Return the verb to plan, and the words without it: the file, which may name the verb."""
    if words and (words[0] in ALGORITHMS or words[0] in PIPELINES):
        return words[0], words[1:]
    if not words:
        raise UsageError(f"VERB or CONFIG.yaml is not set. Name what to plan. Example: {PlanArgs.example}")
    verb = verb_of_file(Path(words[0]))
    if verb not in ALGORITHMS and verb not in PIPELINES:
        raise UsageError(
            f"{words[0]}: names no verb to plan. Add a line like `verb: sft`, or run posttrain plan VERB {words[0]}"
        )
    return verb, words
