"""Turns the options that several tools share into what the library takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from posttrain.config.sections import DataConfig, ModelConfig
from posttrain.config.tools import EngineArgs, LoadArgs, PromptArgs, RewardArgs, SpeculativeArgs, check_at_least
from posttrain.core.progress import ProgressDisplay, time_left

if TYPE_CHECKING:
    from posttrain.data.reading.records import ReadProgress
    from posttrain.engines.base import EngineSpec


@contextmanager
def reading_progress(
    names: Sequence[str], stream: TextIO | None = None
) -> Iterator[tuple[ReadProgress, Callable[[int], None] | None]]:
    """Show on a terminal which part of the files was read, the remaining time, and the number of examples."""
    from posttrain.data.reading.records import ReadProgress
    from posttrain.data.reading.sources import source_parts

    meter, started = ReadProgress(), time.monotonic()
    title = names[0] if len(names) == 1 else f"{len(names)} files"
    with ProgressDisplay(stream=stream or sys.stderr, transient=True) as display:
        if not display.on_terminal:
            yield meter, None
            return
        meter.total = sum(part.size for name in names for part in source_parts(name))

        def report(rows: int) -> None:
            eta = time_left(started, meter.done, meter.total)
            display.update(title, f"{rows:,} examples", done=meter.done, total=meter.total or None, eta=eta)

        yield meter, report


def model_of(path: str, options: LoadArgs) -> ModelConfig:
    return ModelConfig(path=path, dtype=options.dtype, load_in_4bit=options.load_in_4bit)


def data_of(options: PromptArgs, files: tuple[str, ...]) -> DataConfig:
    check_at_least(options, max_examples=0)
    return DataConfig(
        train=files,
        chat_template=options.chat_template,
        map_keys=options.map_keys,
        max_examples=options.max_examples,
        max_mixture_examples=options.max_examples,
        weights=options.weights,
        max_length=options.max_prompt_length,
        on_overlong=options.on_overlong,
        on_bad_example=options.on_bad_example,
    )


def engine_of(options: SpeculativeArgs) -> EngineSpec:
    """Return the engine that options choose; tools without EngineArgs have the local one."""
    from posttrain.engines.base import EngineSpec

    spec = EngineSpec(
        speculative_tokens=options.speculative_tokens, speculative_max_sequences=options.speculative_max_sequences
    )
    if isinstance(options, EngineArgs):
        spec = replace(spec, name=options.engine, vllm_options=options.vllm_options, num_beams=options.num_beams)
    return spec


def rewards_of(options: RewardArgs) -> dict[str, Any]:
    """Return the arguments of `Rewards` and `Scoring`, apart from the rewards themselves."""
    return {
        "weights": options.reward_weights,
        "timeout_seconds": options.timeout_seconds,
        "memory_gib": options.memory_gib,
        "workers": options.workers,
        "env": options.env,
        "allow_unprotected_code": options.allow_unprotected_code,
    }
