"""The data of a run: examples that are read, checked and encoded before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.algorithms import Algorithm
from posttrain.config.sections import Config, OnlineConfig
from posttrain.core.errors import DataError, UsageError
from posttrain.core.types import Prompt, Sample
from posttrain.data.check import rendered_spans
from posttrain.data.dataset import Dataset, Encoder, ExampleStream, load_dataset, split_examples
from posttrain.models.loading import read_config
from posttrain.models.paths import is_adapter


@dataclass(slots=True)
class RunData:
    """Examples to train and to evaluate on, encoded and checked."""

    train: Dataset
    eval: Dataset | None
    stream: ExampleStream
    examples_after: list[int]  # [step]: examples of the stream that are consumed after that step

    @property
    def steps(self) -> int:
        return len(self.examples_after) - 1

    def next_examples(self, step: int) -> list[Sample]:
        """Return the samples of the examples that an offline step trains on."""
        return self.stream.take(self.examples_after[step] - self.examples_after[step - 1])


def load_data(
    config: Config, algorithm: Algorithm, tokenizer: Any, vocabulary: int, folder: Path | None = None
) -> RunData:
    """Reads, recognises and encodes all examples; every problem with them is reported here.

    `folder`: the run directory, where bad examples are set aside and data that does not fit into memory is stored.
    """
    quarantine = folder / "quarantine.jsonl" if folder else None
    if quarantine:
        quarantine.unlink(missing_ok=True)  # of an earlier start of this run
    encoder = Encoder(
        tokenizer,
        config.data,
        algorithm.example_kind,
        vocab_size=vocabulary,
        placeholder=algorithm.placeholder(),
        needs_margin=algorithm.needs_margin(),
    )
    train = load_dataset(
        config.data.train,
        encoder,
        config.data.max_examples or None,
        weights=config.data.weights,
        quarantine=quarantine,
        cache=folder,
    )
    evaluation: Dataset | None = None
    if config.data.eval:
        evaluation = load_dataset(config.data.eval, encoder, quarantine=quarantine, cache=folder)
    elif config.data.eval_fraction:
        train, evaluation = split_examples(train, config.data.eval_fraction, config.seed)
    if evaluation is not None:
        evaluation.examples.hold()  # what the reference model writes into these is used again at the next evaluation
    strata = None
    if encoder.kind != "prompt":
        strata = [algorithm.stratum(example[0]) for example in train.sample_groups]
    size = config.train.batch_size
    stream = ExampleStream(train.examples, size, config.seed, config.data.shuffle, strata, train.mixture)
    edges = count_examples_after(config, stream.examples_per_epoch, algorithm.min_batch_size)
    smallest = min(after - before for before, after in pairwise(edges))
    if smallest < algorithm.min_batch_size:
        raise UsageError(
            f"{algorithm.name} needs at least {algorithm.min_batch_size} examples per step, but a step has {smallest}: "
            f"train.batch_size is {size}, and there are {stream.examples_per_epoch} examples."
        )
    if evaluation is not None and len(evaluation.examples) < algorithm.min_batch_size:
        raise UsageError(
            f"{algorithm.name} needs at least {algorithm.min_batch_size} examples to evaluate on, but there are "
            f"{len(evaluation.examples)}."
        )
    return RunData(train, evaluation, stream, edges)


def count_examples_after(config: Config, examples: int, min_batch_size: int) -> list[int]:
    """Return how many examples are consumed after each step, beginning with 0.

    With `epochs` every example is used equally often, and the last step may be smaller.
    """
    size = config.train.batch_size
    if config.train.max_steps:
        return [step * size for step in range(config.train.max_steps + 1)]
    total = max(1, round(config.train.epochs * examples))
    edges = [*range(0, total, size), total]
    if len(edges) > 2 and edges[-1] - edges[-2] < min_batch_size:  # too few for the loss: they join the step before
        del edges[-2]
    return edges


def check_lengths(model_folder: str, data: RunData, config: Config) -> str:
    """Raise DataError if a model with learned position embeddings has fewer than a sequence needs.

    For a model with rotary embeddings (RoPE), which can compute any position, returns a warning, or "".
    """
    if is_adapter(model_folder):
        return ""
    described = read_config(model_folder, "token").get_text_config()
    limit = getattr(described, "max_position_embeddings", None)
    if limit is None:
        return ""
    longest = max(int(part.examples.lengths().max()) for part in (data.train, data.eval) if part)
    completion = config.rollout.max_tokens if isinstance(config, OnlineConfig) else 0
    if hasattr(described, "rope_parameters"):
        if longest + completion <= limit:
            return ""
        return (
            f"sequences may have {longest + completion:,} tokens, but the model was trained for {limit:,}: expect poor "
            "completions"
        )
    if completion:
        if longest + completion > limit:
            raise DataError(
                f"the longest prompt has {longest} tokens and rollout.max_tokens is {completion}, but the model has "
                f"{limit} positions: lower rollout.max_tokens, or data.max_length with data.on_overlong drop"
            )
        return ""
    too_long = [part for part in (data.train, data.eval) if part and part.examples.lengths().max() > limit]
    for sample in (sample for part in too_long for sample in part.samples()):
        if len(sample) > limit:
            raise DataError(
                f"{sample.origin}: {len(sample)} tokens, but the model has {limit} positions. "
                f"Set data.max_length to {limit}; data.on_overlong says what happens to longer examples."
            )
    return ""


def describe(config: Config, data: RunData, folder: Path) -> Iterator[str]:
    """Yield lines that state what the run will do: its data, the size of a step, the number of steps."""
    examples, counts = len(data.train.examples), data.train.counts
    lengths, trained = data.train.examples.lengths(), data.train.examples.counted()
    notable = ("truncated", "dropped", "quarantined")
    changed = ", ".join(f"{counts[name]:,} {name}" for name in notable if counts[name])
    size = f"{examples:,} examples, {len(lengths):,} samples, {lengths.sum():,} tokens of which {trained:,} count"
    if isinstance(config, OnlineConfig):
        shortest, longest = lengths.min(), lengths.max()
        size = f"{examples:,} prompts of {shortest if shortest == longest else f'{shortest} to {longest}'} tokens"
    yield f"data: {size}" + (f" ({changed})" if changed else "")
    if data.eval is not None:
        aside = data.eval.counts["quarantined"] if config.data.eval else 0
        yield f"evaluation: {len(data.eval.examples):,} examples" + (f" ({aside:,} quarantined)" if aside else "")
    if counts["quarantined"] or (data.eval is not None and data.eval.counts["quarantined"]):
        yield f"examples that cannot be used are in {folder / 'quarantine.jsonl'}"
    if data.train.mixture is not None:
        shares = zip(data.train.mixture.counts, data.train.mixture.sizes, strict=True)
        yield "an epoch mixes " + ", ".join(f"{count:,} of {size:,} examples" for count, size in shares)
    epochs = data.examples_after[-1] / data.stream.examples_per_epoch
    if isinstance(config, OnlineConfig):
        completions = config.train.batch_size * config.rollout.samples_per_prompt
        updates = -(-completions // (config.algo.mini_batch_size or completions)) * config.algo.epochs_per_batch
        yield (
            f"a step: {config.train.batch_size} prompts x {config.rollout.samples_per_prompt} completions of at "
            f"most {config.rollout.max_tokens} tokens = {completions} completions, "
            f"{updates} optimizer step{'s' * (updates > 1)}"
        )
    yield (
        f"steps: {data.steps:,} of {config.train.batch_size} examples = {epochs:.2f} epochs; "
        f"micro-batches of {config.train.micro_batch_tokens:,} tokens"
    )
    yield f"run: {folder}"


def previews(tokenizer: Any, example: Sequence[Sample | Prompt], *, is_pair: bool) -> list[dict[str, Any]]:
    """Return the samples of an example for a person to check; those of a pair are chosen and rejected."""
    rows = [preview(tokenizer, entry) for entry in example]
    if is_pair:
        return [row | {"role": role} for row, role in zip(rows, ("chosen", "rejected"), strict=True)]
    return rows  # several, if an indexed file has packed them


def preview(tokenizer: Any, example: Sample | Prompt) -> dict[str, Any]:
    """Return a sample as its whole text and the parts of it that count, or a prompt."""
    if isinstance(example, Prompt):
        text = tokenizer.decode(example.tokens, skip_special_tokens=False)
        return {"origin": example.origin, "text": text, "tokens": len(example.tokens), "columns": example.columns}
    counted = tokenizer.decode(example.tokens[example.mask], skip_special_tokens=False)
    whole = tokenizer.decode(example.tokens, skip_special_tokens=False)
    spans = [[span.text, span.trained] for span in rendered_spans(tokenizer, example.tokens, example.mask)]
    return {"origin": example.origin, "text": whole, "counts": counted, "spans": spans, "tokens": len(example)}
