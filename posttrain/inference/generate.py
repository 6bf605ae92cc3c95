"""Generates a file of completions, one per line. After a kill the same command resumes, and the file is the same.

Completions are generated batch by batch, and a batch always has the same prompts. On resume the file is truncated to
whole batches, so that no completion is lost or repeated, and none depends on when the kill came.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.config.sections import ClusterConfig, DataConfig, ModelConfig
from posttrain.core.disk import disk_errors
from posttrain.core.errors import DataError, UsageError
from posttrain.core.files import atomic_write_json
from posttrain.core.jsonl import as_lines
from posttrain.core.progress import ProgressDisplay, duration
from posttrain.core.types import Prompt, Sample
from posttrain.data.dataset import Dataset, load_dataset
from posttrain.data.encoding.encoder import Encoder
from posttrain.data.encoding.templates import apply_template
from posttrain.data.reading.examples import PromptExample
from posttrain.engines.base import LOCAL, EngineSpec, GenerationRequest, Sampling, seed_for
from posttrain.inference.completion_files import jsonl
from posttrain.inference.model import (
    CONDITION,
    check_sampling,
    conditioned,
    has_position_table,
    position_limit,
    stop_ids_of,
)
from posttrain.inference.workers import check_workers, engine_settings, open_generator, tensor_parallel
from posttrain.models.loading import read_config, vocabulary_size
from posttrain.models.paths import base_model_path, model_fingerprint, resolve_path
from posttrain.models.tokenizers import load_tokenizer

MIN_COMPLETIONS_PER_DEVICE = 64  # below it, starting another worker takes longer than it saves
OPTION_NAMES = {"n": "samples_per_prompt", "batch": "batch_size", "template": "chat_template", "stop_texts": "stop"}
"""Settings in the file beside the completions -> options; the file keeps its names."""
log = logging.getLogger("posttrain")


@dataclass(kw_only=True, slots=True)
class Generation:
    """Settings of a generation."""

    model: ModelConfig
    data: DataConfig  # data.train names the prompts
    out: str
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1  # completions per prompt
    seed: int = 0
    window: tuple[int, int] | None = None  # (3, 2048): the third 2,048 prompts
    around: bool = False  # windows wrap around at the last prompt, so that every window is full
    condition: float | None = None  # the reward that prompts ask for
    condition_template: str = CONDITION
    batch: int = 512  # completions generated and written at a time
    engine: EngineSpec = LOCAL
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # devices, each with a whole model
    resume: bool = False
    section: str = ""  # that the options have in messages, as `generate.` of the pipelines


@dataclass(slots=True)
class GenerationProgress:
    """The progress of a generation; `tokens` and `seconds` are those of this process."""

    done: int
    total: int
    resumed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    left_out: dict[str, int] = field(default_factory=dict)  # examples of the data that are not prompts, by reason

    def show_on(self, display: ProgressDisplay) -> None:
        if not self.seconds and self.done < self.total and not display.on_terminal:
            return  # there is no progress to report yet
        made = self.done - self.resumed
        unfinished = made and self.done < self.total
        display.update(
            f"{self.done:,} of {self.total:,} completions",
            f"{self.tokens / self.seconds:,.0f} tokens/s" if self.seconds and made else "",
            done=self.done,
            total=self.total,
            eta=f"eta {duration(self.seconds * (self.total - self.done) / made)}" if unfinished else "",
            show=self.done == self.total,
        )


def generate(config: Generation, report: Callable[[GenerationProgress], None] = lambda _: None) -> GenerationProgress:
    """Generate and write all completions that are not in the file yet."""
    check_generation(config)
    out = jsonl(config.out)
    refuse_existing(out, config.resume)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(config.model)
    prompts, dataset = load_prompts(config, tokenizer)
    plain = not tokenizer.chat_template
    settings = completion_settings(config, dataset.fingerprint)
    left_out = {name: dataset.counts[name] for name in ("dropped", "quarantined") if dataset.counts[name]}
    total = len(prompts) * config.n
    with open_locked(out) as file:
        done = truncate_to_batches(file, out, settings, config, total)
        progress = GenerationProgress(done, total, resumed=done, left_out=left_out)
        report(progress)
        if done == total:
            return progress
        check_positions(prompts, config)
        apply_template(tokenizer, config.data.chat_template)
        stops = stop_ids_of(config.model, tokenizer, config.data.chat_template)
        size = prompts_per_batch(config)
        batches = [prompts[start : start + size] for start in range(done // config.n, len(prompts), size)]
        logs, devices = out.with_name(f"{out.name}.logs"), devices_for(batches, config)
        with open_generator(config.model, config.data.chat_template, config.engine, devices, logs) as generator:
            started = time.monotonic()
            requests = (requests_for(batch, config) for batch in batches)
            completions = generator.generate_batches(requests, replace(config.sampling, stop_ids=stops))
            for batch, samples in zip(batches, completions, strict=True):
                rows = list(as_rows(tokenizer, batch, samples, config, plain))
                append_and_sync(file, "".join(as_lines(rows)))
                progress.done += len(rows)
                progress.tokens += sum(len(row["tokens"]) for row in rows)
                progress.seconds = time.monotonic() - started
                report(progress)
    return progress


def devices_for(batches: Sequence[Sized], config: Generation) -> ClusterConfig:
    """Limit the devices to the number of batches; warn if smaller batches would use all of them."""
    cluster, completions = config.cluster, sum(map(len, batches)) * config.n
    most = len(batches) * tensor_parallel(config.engine)
    if most < cluster.devices and completions >= MIN_COMPLETIONS_PER_DEVICE * cluster.devices:
        log.warning(
            f"{completions:,} completions in batches of {config.batch}: {cluster.devices - most} of {cluster.devices} "
            f"devices are idle. A smaller {config.section}batch_size uses all of them."
        )
    return replace(cluster, devices=min(cluster.devices, most))


def check_generation(config: Generation) -> None:
    """Raise UsageError for settings that cannot work, before anything is loaded."""
    check_sampling(config.sampling, config.section)
    for name, value in (("samples_per_prompt", config.n), ("batch_size", config.batch)):
        if value < 1:
            raise UsageError(f"{config.section}{name} is {value}; it must be at least 1.")
    if config.window is not None and min(config.window) < 1:
        index, size = config.window
        raise UsageError(f"window_index is {index} and window_size {size}; both must be at least 1.")
    beams = config.engine.num_beams
    if beams and config.n > beams:
        raise UsageError(
            f"samples_per_prompt is {config.n}, but num_beams {beams} finds {beams} completions per prompt."
        )
    if config.n > 1 and config.sampling.temperature == 0 and not beams:
        raise UsageError(
            f"{config.section}samples_per_prompt is {config.n}, but with {config.section}temperature 0 all completions "
            "of a prompt are the same one."
        )
    check_workers(config.model, config.engine, config.cluster, config.sampling)
    jsonl(config.out)


# Prompts


class ConditionedEncoder(Encoder):
    """Adds the requested reward to prompts, with the text that conditional training used."""

    condition: float
    condition_template: str

    def prompts(self, examples: Sequence[PromptExample]) -> list[Prompt | None]:
        """Encode prompts with the condition; their messages stay without it, for rewards and training."""
        encoded = super().prompts(
            [replace(e, prompt=conditioned(e.prompt, self.condition, self.condition_template)) for e in examples]
        )
        pairs = zip(encoded, examples, strict=True)
        return [prompt and replace(prompt, messages=example.prompt) for prompt, example in pairs]


def load_prompts(config: Generation, tokenizer: Any) -> tuple[list[tuple[int, Prompt]], Dataset]:
    """Return (index, prompt) for the prompts of the window, and the whole dataset.

    The index is the place in the data, or in one epoch of the sources mixed by data.weights.
    """
    vocabulary = vocabulary_size(config.model)
    if config.condition is None:
        encoder = Encoder(tokenizer, config.data, "prompt", vocabulary)
    else:
        conditioned_encoder = ConditionedEncoder(tokenizer, config.data, "prompt", vocabulary)
        conditioned_encoder.condition = config.condition
        conditioned_encoder.condition_template = config.condition_template
        encoder = conditioned_encoder
    out = jsonl(config.out)
    quarantine = out.with_name(f"{out.name}.quarantine.jsonl")
    quarantine.unlink(missing_ok=True)  # from an earlier start
    dataset = load_dataset(
        config.data.train, encoder, config.data.max_examples or None, weights=config.data.weights, quarantine=quarantine
    )
    if dataset.mixture is None:
        order: Sequence[int] = range(len(dataset.examples))
    else:  # the same for every seed, so that the windows of several commands do not overlap
        order = dataset.mixture.order(epoch=0, seed=0, shuffle=False).tolist()
    indices = prompt_indices(config, len(order))
    return [(index, dataset.prompts[order[index]][0]) for index in indices], dataset


def prompt_indices(config: Generation, count: int) -> Sequence[int]:
    """Return which of `count` prompts the window contains."""
    if config.window is None:
        return range(count)
    number, size = config.window
    start = (number - 1) * size
    if config.around:
        return [(start + offset) % count for offset in range(min(size, count))]
    if start >= count:
        raise UsageError(f"window_index is {number} with window_size {size}, but there are only {count:,} prompts")
    return range(start, min(start + size, count))


def check_positions(prompts: Sequence[tuple[int, Prompt]], config: Generation) -> None:
    """Raise DataError if a prompt and its completion exceed a model with learned position embeddings."""
    model = read_config(base_model_path(resolve_path(config.model.path)), "token")
    limit = position_limit(model)
    if limit is None or not has_position_table(model):
        return
    longest = max((prompt for _, prompt in prompts), key=lambda prompt: len(prompt.tokens))
    if len(longest.tokens) + config.sampling.max_tokens > limit:
        raise DataError(
            f"{longest.origin}: the prompt has {len(longest.tokens)} tokens and {config.section}max_tokens is "
            f"{config.sampling.max_tokens}, but the model has {limit} positions: lower {config.section}max_tokens"
        )


# Completions


def prompts_per_batch(config: Generation) -> int:
    return max(1, config.batch // config.n)


def requests_for(prompts: Sequence[tuple[int, Prompt]], config: Generation) -> list[GenerationRequest]:
    """Return one request per completion of a batch of prompts."""
    return [
        GenerationRequest(prompt=prompt.tokens, group=place, seed=seed_for(config.seed, place, k))
        for place, prompt in prompts
        for k in range(config.n)
    ]


def as_rows(
    tokenizer: Any, prompts: Sequence[tuple[int, Prompt]], samples: Sequence[Sample], config: Generation, plain: bool
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch, as `posttrain score`, `posttrain select` and `posttrain sft` read them."""
    wanted = [(place, prompt, k) for place, prompt in prompts for k in range(config.n)]
    for (place, prompt, k), sample in zip(wanted, samples, strict=True):
        assert sample.logprobs is not None
        tokens = sample.tokens[sample.mask]
        row = {
            "index": place,
            "sample": k,
            "origin": prompt.origin,
            "prompt": prompt.messages[0]["content"] if plain else prompt.messages,
            "completion": tokenizer.decode(tokens, skip_special_tokens=True),
            "finish": sample.finish,
            "tokens": tokens.tolist(),
            "logprob": float(sample.logprobs[sample.mask].astype("float64").sum()),
            "seed": seed_for(config.seed, place, k),
            "columns": prompt.columns,
        }
        if config.condition is not None:
            with_condition = conditioned(prompt.messages, config.condition, config.condition_template)
            row["asked"] = with_condition[0]["content"] if plain else with_condition
        yield row


# The file


def manifest_of(out: Path) -> Path:
    """Return the file beside the completions that holds their settings."""
    return out.with_name(f"{out.name}.settings.json")


def completion_settings(config: Generation, data_fingerprint: str) -> dict[str, Any]:
    """Return the settings that completions depend on; model and data by a hash of their content, not by their path."""
    settings = {
        "model": model_fingerprint(resolve_path(config.model.path)),
        "dtype": config.model.dtype,
        "load_in_4bit": config.model.load_in_4bit,
        "data": data_fingerprint,
        "template": config.data.chat_template,
        **{name: value for name, value in asdict(config.sampling).items() if name != "stop_ids"},
        "n": config.n,
        "seed": config.seed,
        "window": config.window,
        "condition": config.condition,
        "batch": config.batch,
        **({"around": True} if config.around else {}),
        **engine_settings(config.engine),
    }
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


def refuse_existing(out: Path, resume: bool) -> None:
    """Raise UsageError, before anything is loaded, if the file has completions and this is no resume."""
    if out.exists() and out.stat().st_size and not resume:
        raise UsageError(f"output_file {out} already has completions. Add --resume to continue, or name another file.")


@contextmanager
def open_locked(out: Path) -> Iterator[BinaryIO]:
    """Open the file with an exclusive lock."""
    with out.open("ab", buffering=0) as raw:
        file: Any = raw
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"output_file {out}: another process is writing it. Wait for it, or name another."
            ) from None
        with disk_errors(out, advice="Free some space, and continue with --resume."):
            yield file


def truncate_to_batches(file: BinaryIO, out: Path, settings: dict[str, Any], config: Generation, total: int) -> int:
    """Cut off an incomplete batch, and return the number of rows that are left.

    Raises UsageError if the rows were generated with other settings; for a new file, the settings are written.
    """
    manifest = manifest_of(out)
    if not out.stat().st_size:
        made_from = {"model": config.model.path, "data": config.data.train}
        atomic_write_json(manifest, {"made_from": made_from, "settings": settings})
        return 0
    refuse_existing(out, config.resume)
    if not manifest.is_file():
        raise UsageError(f"output_file {out}: {manifest.name} is missing, so its settings are unknown")
    try:
        before = dict(json.loads(manifest.read_text(encoding="utf-8"))["settings"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{manifest}: cannot be read: {error!r}") from error
    if changed := changed_settings(before, settings):
        raise UsageError(
            f"output_file {out} was started with other settings: {'; '.join(changed)}. Use the same ones, "
            "or name another file."
        )
    lines, ends = 0, [0]
    with out.open("rb") as stored:
        for line in stored:
            if not line.endswith(b"\n"):
                break
            lines += 1
            ends.append(ends[-1] + len(line))
    if lines > total:
        raise UsageError(f"output_file {out} has {lines:,} completions, but only {total:,} are requested")
    whole = prompts_per_batch(config) * config.n
    kept = lines if lines == total else lines // whole * whole
    if ends[kept] < out.stat().st_size:
        os.ftruncate(file.fileno(), ends[kept])
    return kept


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Describe each setting that changed, under the name of its option."""
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [
        f"another {name}"
        if name in ("model", "data")
        else f"{OPTION_NAMES.get(name, name)} was {before.get(name)!r}, is {now.get(name)!r}"
        for name in names
    ]


def append_and_sync(file: BinaryIO, text: str) -> None:
    """Append a whole batch, which the operating system may write in parts, and fsync it."""
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())
