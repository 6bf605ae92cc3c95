"""Mix, split, generate, score, select, evaluate, plot, export and convert from Python; data are files or in memory.

Each returns Python objects; with `output_file` or `output_dir` the files that the command writes are kept, too.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from posttrain.api.options import Data, Examples, LoadedTokenizer, Model, PathLike, Reward
from posttrain.config.sections import SPECULATIVE_MAX_SEQUENCES
from posttrain.core.errors import UsageError
from posttrain.core.temporary import TemporaryFolder

if TYPE_CHECKING:
    from posttrain.config.sections import ModelConfig
    from posttrain.convert.conversion import ConversionReport
    from posttrain.core.statistics import Comparison, Figure

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Row = dict[str, Any]


def generate(
    model: Model,
    data: Data,
    *,
    samples_per_prompt: int = 1,
    max_tokens: int = 512,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    chat_template: str = "",
    map_keys: Mapping[str, str] | None = None,
    max_examples: int = 0,
    max_prompt_length: int = 2048,
    on_overlong: Literal["error", "drop"] = "error",
    on_bad_example: Literal["stop", "quarantine"] = "stop",
    batch_size: int = 512,
    devices: int = 1,
    engine: Literal["local", "vllm"] = "local",
    vllm_options: Mapping[str, Any] | None = None,
    num_beams: int = 0,
    speculative_tokens: int = 0,
    speculative_max_sequences: int = SPECULATIVE_MAX_SEQUENCES,
    condition: float | None = None,
    condition_template: str = "",
    tokenizer: str | LoadedTokenizer | None = None,
    dtype: Dtype = "auto",
    load_in_4bit: bool = False,
    output_file: PathLike = "",
    resume: bool = False,
    quiet: bool = True,
) -> list[Row]:
    """Generate completions for prompts and return one dict per completion, in the order of the prompts.

    Like `posttrain generate`: each dict has prompt, completion, finish (stop or length), tokens, logprob and the
    columns of its example. `score` and `select` take them as they are.

    Arguments:
        model: directory, Hugging Face name, run directory or `pico`; or a loaded model, with `tokenizer`
        data: files or examples in memory (a list of dicts, a datasets.Dataset) with prompts
        samples_per_prompt: completions per prompt
        max_tokens: longest completion in tokens
        temperature: sampling temperature; 0 takes the most likely token
        top_p, top_k, min_p: limit the tokens to sample from, as in the section `rollout` of training
        repetition_penalty: above 1: tokens that were there become less likely
        stop: texts that end a completion, besides the end-of-turn token
        seed: the same seed gives the same completions
        chat_template: chat template by name, file or text, instead of the model's own
        map_keys: columns of the data for the names used here, as {"prompt": "question"}
        max_examples: use only the first examples; 0: all
        max_prompt_length: longest prompt in tokens; on_overlong says what happens to longer ones
        on_bad_example: what happens to an example without a prompt
        batch_size: completions that are generated and written together
        devices: worker processes, one per device, each with a whole model
        engine, vllm_options: what generates, and options of vLLM by its own names
        num_beams: beam search with this many beams instead of sampling
        speculative_tokens: tokens that the local engine drafts per sequence and step; 0: no speculative decoding
        speculative_max_sequences: draft tokens only while at most this many sequences are being generated
        condition, condition_template: the reward that prompts ask for, and how; for models of conditional_sft
        dtype, load_in_4bit: how the model is loaded
        output_file: .jsonl file to keep; `resume` continues one that is not complete
        quiet: without progress lines
    """
    from posttrain.config.sections import ClusterConfig, DataConfig
    from posttrain.core.logging import quiet_libraries
    from posttrain.core.progress import ProgressDisplay
    from posttrain.engines.base import EngineSpec, Sampling
    from posttrain.inference.generate import Generation
    from posttrain.inference.generate import generate as write_completions
    from posttrain.inference.model import CONDITION

    quiet_libraries()
    with Workspace(output_file) as workspace:
        config = Generation(
            model=workspace.model(model, tokenizer, dtype, load_in_4bit),
            data=DataConfig(
                train=tuple(workspace.files("data", data)),
                chat_template=chat_template,
                map_keys=dict(map_keys or {}),
                max_examples=max_examples,
                max_length=max_prompt_length,
                on_overlong=on_overlong,
                on_bad_example=on_bad_example,
            ),
            out=str(workspace.output),
            sampling=Sampling(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                stop_texts=tuple(stop),
            ),
            n=samples_per_prompt,
            seed=seed,
            batch=batch_size,
            engine=EngineSpec(
                engine,
                dict(vllm_options or {}),
                num_beams,
                speculative_tokens=speculative_tokens,
                speculative_max_sequences=speculative_max_sequences,
            ),
            condition=condition,
            condition_template=condition_template or CONDITION,
            cluster=ClusterConfig(devices=devices),
            resume=resume,
        )
        with ProgressDisplay(quiet=quiet) as display:
            write_completions(config, lambda progress: progress.show_on(display))
        return workspace.rows()


def score(
    data: Data,
    reward: Reward,
    *,
    reward_weights: Sequence[float] = (),
    normalize: bool = False,
    timeout_seconds: float = 10.0,
    memory_gib: float = 2.0,
    workers: int = 2,
    max_failure_rate: float = 0.1,
    env: Sequence[str] = (),
    map_keys: Mapping[str, str] | None = None,
    max_examples: int = 0,
    chat_template: str = "",
    max_length: int = 2048,
    dtype: Dtype = "auto",
    output_file: PathLike = "",
) -> list[Row]:
    """Add rewards to completions and return them: `reward` is the sum, `rewards` has its parts by name.

    Like `posttrain score`. A completion that could not be scored has the reward None and a reason in `failure`.

    Arguments:
        data: completions of `generate`, or any examples with a prompt and a completion; a file, or in memory
        reward: names of verifiers, Python functions, FILE.py:FUNCTION, model:PATH, http://..., or several of these
        reward_weights: weight of each reward; 1 each by default
        normalize: subtract the mean of all rewards and divide by their standard deviation
        timeout_seconds, memory_gib, workers: limits and number of the processes that run reward functions
        max_failure_rate: share of completions that may fail before an error is raised
        env: names of environment variables that reward functions may read, such as API keys
        map_keys: columns of the data for the names used here, as {"completion": "text"}
        max_examples: score only the first ones; 0: all
        chat_template, max_length, dtype: for reward models
        output_file: .jsonl file to write, too
    """
    from posttrain.api.arguments import is_one_reward
    from posttrain.config.sections import DataConfig, ModelConfig
    from posttrain.core.logging import quiet_libraries
    from posttrain.inference.score import Scoring, score_file
    from posttrain.rewards.specs import reward_texts

    quiet_libraries()
    if isinstance(reward, Mapping):
        raise UsageError("reward must be names or functions; options are arguments of score() here")
    functions: Any = [reward] if is_one_reward(reward) else reward
    with Workspace(output_file) as workspace:
        scored = score_file(
            Scoring(
                file=workspace.file(data),
                out=str(workspace.output),
                reward=tuple(reward_texts(functions)),
                weights=tuple(reward_weights),
                normalize=normalize,
                timeout_seconds=timeout_seconds,
                memory_gib=memory_gib,
                workers=workers,
                max_failure_rate=max_failure_rate,
                env=tuple(env),
                map_keys=dict(map_keys or {}),
                max_rows=max_examples or None,
                model=ModelConfig(dtype=dtype),
                data=DataConfig(chat_template=chat_template, max_length=max_length),
            )
        )
        return scored.rows


def select(
    method: Literal["best-of-n", "pairs", "condition", "threshold", "top-fraction"],
    data: Data,
    *,
    min_reward: float | None = None,
    fraction: float | None = None,
    condition_template: str = "",
    map_keys: Mapping[str, str] | None = None,
    output_file: PathLike = "",
) -> list[Row]:
    """Select training examples from scored completions and return them.

    Like `posttrain select`: best-of-n (the best completion of each prompt, for sft), pairs (the best and the worst,
    for dpo), condition (all, with prompts that state the reward), threshold (at least `min_reward`), top-fraction (the
    best `fraction` of all).

    Arguments:
        data: completions with rewards, of `score`; a file, or in memory
        condition_template: text of conditioned prompts, with {prompt} and {reward}
        map_keys: columns of the data for the names used here
        output_file: .jsonl file to write, too
    """
    from posttrain.inference.select import METHODS, select_file

    if method not in METHODS:
        raise UsageError(f"select: there is no method {method!r}; the methods are {', '.join(METHODS)}")
    values: list[Any] = []
    for name, value, owner in (
        ("min_reward", min_reward, "threshold"),
        ("fraction", fraction, "top-fraction"),
        ("condition_template", condition_template or None, "condition"),
    ):
        if value is not None and method != owner:
            raise UsageError(f"{name} is for the method {owner}, not for {method}")
        if value is None and method == owner != "condition":
            raise UsageError(f"the method {method} needs {name}")
        values += [value] if value is not None else []
    with Workspace(output_file) as workspace:
        return select_file(method, workspace.file(data), workspace.output, *values, map_keys=dict(map_keys or {})).rows


@dataclass(slots=True)
class Evaluation:
    """Figures of a model on prompts: each with a 95% confidence interval."""

    figures: dict[str, Figure]
    """By name: reward (mean@n), accuracy (mean@n), pass@k."""
    completions: list[Row]
    """All completions with their rewards."""
    failures: list[Row]
    """One wrong completion per prompt, those of the lowest accuracy first."""
    comparison: dict[str, Comparison] = field(default_factory=dict)
    """With `against`: the difference in reward and accuracy, prompt by prompt, and its p-value."""


def evaluate(
    model: Model,
    data: Data,
    reward: Reward,
    *,
    against: Model | None = None,
    samples_per_prompt: int = 1,
    max_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    stop: Sequence[str] = (),
    seed: int = 0,
    pass_threshold: float = 0.5,
    reward_weights: Sequence[float] = (),
    max_failure_rate: float = 0.1,
    chat_template: str = "",
    map_keys: Mapping[str, str] | None = None,
    max_examples: int = 0,
    max_prompt_length: int = 2048,
    devices: int = 1,
    engine: Literal["local", "vllm"] = "local",
    tokenizer: str | LoadedTokenizer | None = None,
    dtype: Dtype = "auto",
    output_dir: PathLike = "",
) -> Evaluation:
    """Generate and score completions, and return accuracy, pass@k and mean reward with confidence intervals.

    Like `posttrain eval`. A completion counts as correct if its first reward is above `pass_threshold`.

    Arguments:
        model, tokenizer, dtype: as for `generate`
        data: prompts, in files or in memory
        reward: what scores completions, as for `score`
        against: a second model, which is compared with the first prompt by prompt
        samples_per_prompt: completions per prompt: n of mean@n, and the largest k of pass@k
        max_tokens, temperature, top_p, top_k, min_p, stop, seed: as for `generate`
        output_dir: directory to keep completions and scores in
        chat_template, map_keys, max_examples, max_prompt_length, devices, engine: as for `generate`
        reward_weights, max_failure_rate: as for `score`
    """
    from posttrain.inference.completion_files import read_completions
    from posttrain.inference.evaluation import compare_models, failures, figures, results_by_prompt
    from posttrain.inference.model import TEMPLATE_TOKENS

    def scored(model: Model, name: str, folder: Path) -> Path:
        """Generate and score the completions of a model; return the file."""
        completions = generate(
            model,
            data,
            samples_per_prompt=samples_per_prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop=stop,
            seed=seed,
            chat_template=chat_template,
            map_keys=map_keys,
            max_examples=max_examples,
            max_prompt_length=max_prompt_length,
            devices=devices,
            engine=engine,
            tokenizer=tokenizer,
            dtype=dtype,
            output_file=folder / f"{name}-completions.jsonl",
        )
        file = folder / f"{name}-scored.jsonl"
        score(
            completions,
            reward,
            reward_weights=reward_weights,
            max_failure_rate=max_failure_rate,
            max_length=max_prompt_length + max_tokens + TEMPLATE_TOKENS,
            dtype=dtype,
            output_file=file,
        )
        return file

    with directory(output_dir) as folder:
        file = scored(model, "model", folder)
        prompts = results_by_prompt(read_completions(str(file)), pass_threshold)
        found = Evaluation(figures(prompts), rows_of(file), failures(prompts))
        if against is not None:
            others = results_by_prompt(read_completions(str(scored(against, "against", folder))), pass_threshold)
            found.comparison = compare_models(prompts, others)
        return found


def mix_data(
    data: Data,
    *,
    weights: Sequence[float] = (),
    max_examples: Sequence[int] = (),
    total_examples: int = 0,
    repeat: bool = False,
    shuffle: bool = True,
    seed: int = 0,
    normalize: bool = False,
    trainer: str = "",
    map_keys: Mapping[str, str] | None = None,
    output_file: PathLike = "",
) -> list[Row]:
    """Mix several sources and return the rows of the mixture.

    Like `posttrain data mix`: the same seed gives the same rows in the same order.

    Arguments:
        data: several files or lists of examples
        weights: share of each source, as data.weights; none: all examples of every source
        max_examples: most examples of each source, drawn at random: one number, or one per source; 0: all
        total_examples: rows of the mixture; 0: as many as the weights and limits allow
        repeat: with weights: repeat small sources until every source is used up
        shuffle: random order; False keeps the order of each source
        seed: the same seed gives the same mixture
        normalize: write all examples in one format (messages); False keeps rows, which must have one format
        trainer: trainer that the mixture is for, such as dpo; empty: the first kind of example that all sources give
        map_keys: columns of the data for the names used here
        output_file: .jsonl file to write, too
    """
    from posttrain.algorithms import example_kind
    from posttrain.data.curation.mix import MixConfig, mix

    config = MixConfig(
        weights=weights,
        max_examples=max_examples,
        total_examples=total_examples,
        repeat=repeat,
        shuffle=shuffle,
        seed=seed,
        normalize=normalize,
        kind=example_kind(trainer),
        map_keys=map_keys,
    )
    with Workspace(output_file) as workspace:
        mix(workspace.files("data", data), workspace.output, config)
        return workspace.rows()


def split_data(
    data: Data,
    *,
    eval_fraction: float = 0.0,
    eval_examples: int = 0,
    test_fraction: float = 0.0,
    test_examples: int = 0,
    near_duplicates: bool = True,
    similarity: float = 0.8,
    seed: int = 0,
    trainer: str = "",
    map_keys: Mapping[str, str] | None = None,
    output_dir: PathLike = "",
) -> dict[str, list[Row]]:
    """Split examples and return the rows of `train` and of `eval` and `test`, if these are asked for.

    Like `posttrain data split`: examples of one prompt and near-duplicates are in one part.

    Arguments:
        data: files or examples in memory, of one format
        eval_fraction, eval_examples: share or number of examples for evaluation
        test_fraction, test_examples: share or number of examples for a test
        near_duplicates: keep near-duplicates together, not only examples of one prompt
        similarity: lowest Jaccard similarity of near-duplicates, from 0.3 to 1
        seed: the same seed gives the same split
        trainer: trainer that the examples are for; empty: the first kind of example that they give
        map_keys: columns of the data for the names used here
        output_dir: directory to write train.jsonl, eval.jsonl and test.jsonl to, too
    """
    from posttrain.algorithms import example_kind
    from posttrain.data.curation.split import SplitConfig, files_of, split

    config = SplitConfig(
        eval_fraction=eval_fraction,
        eval_examples=eval_examples,
        test_fraction=test_fraction,
        test_examples=test_examples,
        near_duplicates=near_duplicates,
        similarity=similarity,
        seed=seed,
        kind=example_kind(trainer),
        map_keys=map_keys,
    )
    with Workspace("") as workspace, directory(output_dir) as folder:
        report = split(workspace.files("data", data), files_of(folder, config, overwrite=True), config)
        return {part: rows_of(path) for part, path in report.files.items()}


def plot(
    runs: PathLike | Sequence[PathLike],
    *,
    metrics: Sequence[str] = (),
    x_axis: Literal["step", "tokens", "time"] = "step",
    smoothing: float = 0.0,
    log_scale: bool = False,
    output_file: PathLike = "",
) -> Any:
    """Draw curves of one or several runs and return the figure of matplotlib; with a file, write that instead.

    Like `posttrain plot`.

    Arguments:
        runs: run directories
        metrics: metrics by name or pattern, such as "eval/*"; none: the reward of an online run, the loss of others
        x_axis: steps, tokens trained on, or minutes
        smoothing: weight of the moving average, from 0 to below 1
        log_scale: logarithmic vertical axis
        output_file: .html, .svg or .png file to write; only .png needs matplotlib
    """
    from posttrain.plots.figure import figure
    from posttrain.plots.files import new_chart_file, write_charts
    from posttrain.plots.runs import open_runs, panels_of

    paths = [runs] if isinstance(runs, str | os.PathLike) else runs
    opened = open_runs([os.fspath(path) for path in paths])
    panels = panels_of(opened, metrics, x_axis, smoothing, log_scale)
    if not os.fspath(output_file):
        return figure(panels)
    write_charts(panels, new_chart_file(os.fspath(output_file), overwrite=True), ", ".join(run.name for run in opened))
    return None


def export(
    source: PathLike,
    output_dir: PathLike,
    *,
    target_format: Literal["hf", "gguf", "fp8", "awq", "gptq"] = "hf",
    gguf_type: Literal["f16", "q8_0", "q4_k_m"] = "q8_0",
    merge: bool = True,
    use_ema: bool = False,
    calibration_data: PathLike = "",
    calibration_examples: int = 256,
    push_to: str = "",
    private: bool = True,
) -> dict[str, Any]:
    """Write the model of a run, checkpoint or directory for Hugging Face's libraries or another runtime.

    Like `posttrain export`: the result is read back and compared with its source. Returns a report; of formats other
    than hf it has `kl`, the KL divergence per token from the original.

    Arguments:
        target_format: hf (Hugging Face directory), gguf (llama.cpp, Ollama), fp8, awq or gptq (vLLM)
        gguf_type: type of the weights in a GGUF file
        merge: merge LoRA adapters into their base; False keeps them as adapters
        use_ema: export the moving average of the weights (train.ema_decay)
        calibration_data: data file with examples of what the model will see, for awq and gptq
        calibration_examples: number of its first examples that are used
        push_to: upload the result to the Hugging Face hub under this name, with a model card made from the run
        private: create the repository as a private one
    """
    from posttrain.core.logging import quiet_libraries
    from posttrain.publish.formats import Calibration
    from posttrain.publish.formats import export as write

    quiet_libraries()
    return write(
        os.fspath(source),
        Path(output_dir),
        target_format=target_format,
        gguf_type=gguf_type,
        merge=merge,
        use_ema=use_ema,
        calibration=Calibration(os.fspath(calibration_data), calibration_examples),
        push_to=push_to,
        private=private,
    )


def merge(
    models: Sequence[PathLike],
    output_dir: PathLike,
    *,
    method: Literal["linear", "slerp", "ties", "dare_linear", "dare_ties"] = "linear",
    base: PathLike = "",
    weights: Sequence[float] = (),
    t: float = 0.5,
    density: float = 0.5,
    scale: float = 1.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Merge several models, or adapters with their base, into one Hugging Face directory; return a report.

    Like `posttrain merge`: one tensor of each model is in memory at a time; models that do not fit are refused.

    Arguments:
        method: linear (weighted mean), slerp (two models), or ties, dare_linear, dare_ties (differences from `base`)
        base: model that the others were trained from, for ties and dare
        weights: weight of each model; default: 1 each
        t: position of slerp, from 0 (the first model) to 1
        density: part of each difference that is kept, for ties and dare
        scale: factor of the merged difference, for ties and dare
        seed: of the random choice of dare
    """
    from posttrain.core.logging import quiet_libraries
    from posttrain.models.merging import MergeSettings, merge_models

    quiet_libraries()
    settings = MergeSettings(method=method, weights=tuple(weights), t=t, density=density, scale=scale, seed=seed)
    return merge_models([os.fspath(model) for model in models], Path(output_dir), settings, os.fspath(base))


def convert(
    source: PathLike,
    output_dir: PathLike,
    *,
    target_format: Literal["hf", "mcore", "legacy"],
    source_format: Literal["auto", "hf", "mcore", "legacy"] = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    layers_per_stage: Sequence[int] = (),
    dtype: Dtype = "auto",
    original: PathLike = "",
    workers: int = 1,
) -> ConversionReport:
    """Convert weights between Hugging Face, Megatron core and Megatron legacy; return counts of what was written.

    Like `posttrain convert`, which also merges adapters and verifies logits.

    Arguments:
        target_format: hf, mcore (Megatron core) or legacy (Megatron legacy)
        source_format: auto recognises it by its files
        tensor_parallel_size, pipeline_parallel_size, expert_parallel_size: ranks of a Megatron target
        layers_per_stage: layers of each pipeline stage; default: the same number in each
        dtype: round the weights to this type; auto keeps their types
        original: Hugging Face directory with config.json and tokenizer, if the source has none
        workers: tensors converted at the same time
    """
    import torch

    from posttrain.convert.conversion import convert as write
    from posttrain.convert.megatron import CheckpointLayout
    from posttrain.convert.source import megatron_kind, open_source, recognise_format

    folder = Path(source)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory")
    sizes = (tensor_parallel_size, pipeline_parallel_size, expert_parallel_size)
    if target_format == "hf" and max(sizes) > 1:
        raise UsageError("a Hugging Face directory is not divided into ranks: leave out the parallel sizes")
    kind = recognise_format(folder) if source_format == "auto" else source_format
    if kind == "sharded":
        raise UsageError(f"{folder} is a run or a checkpoint: export() it first, and convert the result")
    kind = megatron_kind(folder) if kind == "megatron" else kind
    layout = CheckpointLayout()
    if target_format != "hf":
        tp, pp, ep = sizes
        layout = CheckpointLayout(target_format, tp=tp, pp=pp, ep=ep, layers_per_stage=tuple(layers_per_stage))
    opened = open_source(folder, kind, Path(original) if original else None, CheckpointLayout())
    try:
        rounded = None if dtype == "auto" else getattr(torch, dtype)
        return write(opened, Path(output_dir), layout, dtype=rounded, workers=workers)
    finally:
        opened.close()


# Objects in memory as files


class Workspace:
    """A temporary directory for what is given in memory, and for the output unless it is to be kept."""

    def __init__(self, output_file: PathLike) -> None:
        self.temporary = temporary_folder()
        self.folder = self.temporary.path
        self.output = Path(output_file) if os.fspath(output_file) else self.folder / "output.jsonl"

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.temporary.close()

    def files(self, name: str, data: Any) -> list[str]:
        """Return files with the examples; those in memory are written."""
        from posttrain.api.arguments import Arguments
        from posttrain.core.files import atomic_write
        from posttrain.train.inputs import IN_MEMORY, as_json_lines

        collected = Arguments("", ())
        names: list[str] = []
        for source in collected.sources(name, data):
            rows: Examples | None = collected.examples.get(source.removeprefix(IN_MEMORY))
            if rows is not None:
                source = str(self.folder / f"{source.removeprefix(IN_MEMORY)}.jsonl")
                atomic_write(Path(source), as_json_lines(rows))
            names.append(source)
        return names

    def file(self, data: Any) -> str:
        """Return the one file with the examples."""
        names = self.files("data", data)
        if len(names) != 1:
            raise UsageError(f"data: one file or one list of examples is needed here, not {len(names)}")
        return names[0]

    def model(self, model: Any, tokenizer: Any, dtype: Dtype, load_in_4bit: bool) -> ModelConfig:
        """Return the options of a model; a loaded one is saved."""
        from posttrain.api.arguments import Arguments
        from posttrain.config.sections import ModelConfig
        from posttrain.models.saving import save_model

        collected = Arguments("", ())
        collected.add({"model": model, "tokenizer": tokenizer})
        inputs = collected.inputs((), {})
        path, named = collected.options["model.path"], collected.options.get("model.tokenizer", "")
        if inputs.model is not None:
            path, named = str(self.folder / "model"), ""
            save_model(inputs.model, inputs.tokenizer, Path(path))
        elif inputs.tokenizer is not None:
            named = str(self.folder / "tokenizer")
            inputs.tokenizer.save_pretrained(named)
        return ModelConfig(path=path, tokenizer=named, dtype=dtype, load_in_4bit=load_in_4bit)

    def rows(self) -> list[Row]:
        return rows_of(self.output)


@contextmanager
def directory(path: PathLike) -> Iterator[Path]:
    """Yield a directory to keep, or a temporary one."""
    if os.fspath(path):
        yield Path(path)
        return
    with temporary_folder() as temporary:
        yield temporary


def temporary_folder() -> TemporaryFolder:
    """Create a folder in the system's folder for temporary files; a killed process's folder is removed by the next."""
    return TemporaryFolder(Path(tempfile.gettempdir()), "posttrain")


def rows_of(file: Path) -> list[Row]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]
