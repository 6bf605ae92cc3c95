"""The pipelines that are verbs: rejection sampling, iterative DPO, conditional fine-tuning.

Each repeats generate -> score -> select -> train, every iteration with the model of the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.algorithms import ALGORITHMS
from posttrain.config.compare import option_defaults
from posttrain.config.sections import Config, DataConfig, ModelConfig, as_mapping, with_algorithm
from posttrain.core.errors import Stopped, UsageError
from posttrain.core.files import atomic_write_json
from posttrain.data.reading.sources import source_parts
from posttrain.engines.base import EngineSpec, Sampling, seed_for
from posttrain.inference.generate import Generation
from posttrain.inference.model import TEMPLATE_TOKENS, fill_condition
from posttrain.inference.score import Scoring
from posttrain.models.paths import resolve_path
from posttrain.pipelines.settings import RECIPES, PipelineConfig, Recipe
from posttrain.pipelines.stage import REPORT, Figures, Stage, open_folder, run_in
from posttrain.pipelines.stages import Generate, Score, Select, Train, best_reward
from posttrain.pipelines.summary import by_iteration, closing_lines
from posttrain.train.reward_model import check_reward_model

MAY_CHANGE_ON_RESUME = (
    "iterations",
    "output_dir",
    "quiet",
    "resume",
    "reward.workers",
    "log.",
    "save.",
    "cluster.",
    "generate.engine",
    "generate.vllm_options",
)
"""Options that may differ on resume. Of the last two, Generate seals what determines its completions."""


@dataclass(slots=True)
class PipelineResult:
    """The result of a finished pipeline, for Python."""

    output_dir: Path
    model: Path
    iterations: list[Figures]  # iteration 0: the initial model


def run_from(verb: str, config: PipelineConfig, report: Callable[[str], None] = print) -> PipelineResult:
    """Run all iterations; finished stages are skipped."""
    check_pipeline(verb, config)
    with open_folder(
        verb, config.output_dir, as_saved(config), MAY_CHANGE_ON_RESUME, option_defaults(config)
    ) as folder:
        stages = stages_of(verb, config, folder.path)
        try:
            figures = run_in(folder.path, stages, quiet=config.quiet, report=report)
        except Stopped as stopped:
            words = str(stopped).partition(" Resume:")[0]
            raise Stopped(f"{words} Resume: the same command", stopped.exit_code - 128) from stopped
        except KeyboardInterrupt:
            report("\nstopped; resume with the same command")
            raise
        table = by_iteration(stages, figures)
        atomic_write_json(folder.path / REPORT, table)
        model = last_model(folder.path, config.iterations)
        condition = None
        if RECIPES[verb].conditional:
            condition = best_reward(str(folder.path / f"iteration-{config.iterations}/selected.jsonl"))
        for line in closing_lines(table, folder.path, condition, config.condition_template):
            report(line)
        return PipelineResult(folder.path, model, table)


# Checks before the first stage


def check_pipeline(verb: str, config: PipelineConfig) -> None:
    """Raise UsageError for options that cannot work, before anything is loaded."""
    recipe, data, n = RECIPES[verb], config.data, config.generate.samples_per_prompt
    kinds = "a verifier by name, FILE.py:FUNCTION, model:PATH or http://..."
    window, held_out = config.prompts_per_iteration, config.eval.samples_per_prompt
    for problem, message in (
        (
            not config.reward.functions,
            f"reward.functions is not set: what scores completions? Give {kinds}: --reward gsm8k",
        ),
        (not data.train, "data.train is not set. Name the files with prompts: --data prompts.jsonl"),
        (config.iterations < 1, f"iterations is {config.iterations}; it must be at least 1."),
        (window < 0, f"prompts_per_iteration is {window}; it must be at least 0."),
        (
            n < recipe.min_samples_per_prompt,
            f"generate.samples_per_prompt is {n}, but {verb} compares the completions of a prompt: set it to at least "
            f"{recipe.min_samples_per_prompt}.",
        ),
        (
            n == 0 and config.iterations > 1,
            f"generate.samples_per_prompt is 0: the completions in the data stay the same, so iterations must be 1, "
            f"not {config.iterations}.",
        ),
        (
            n == 0 and (len(data.train) != 1 or bool(window)),
            "generate.samples_per_prompt is 0: the completions in the data are scored. Name one file, and leave "
            "prompts_per_iteration out.",
        ),
        (held_out < 1, f"eval.samples_per_prompt is {held_out}; it must be at least 1."),
        (
            held_out > 1 and config.eval.temperature == 0 and bool(data.eval),
            f"eval.samples_per_prompt is {held_out}, but with eval.temperature 0 all completions of a prompt are the "
            "same one.",
        ),
        (config.eval.temperature < 0, f"eval.temperature is {config.eval.temperature}; it must be at least 0."),
        (
            bool(data.eval_fraction),
            "data.eval_fraction is set, but a pipeline evaluates on files: --data.eval FILE",
        ),
    ):
        if problem:
            raise UsageError(message)
    fill_condition(config.condition_template, "", 0.0)
    stages_of(verb, config, Path())  # the stages check their options
    for name in (*data.train, *data.eval):
        source_parts(name)
    resolve_path(config.model.path)
    with scoring(config, "", "").rewards() as rewards:
        rewards.check()
        for _, path in rewards.models:
            check_reward_model(path)


def as_saved(config: PipelineConfig) -> dict[str, Any]:
    """Return the options as the run directory records them."""
    return as_mapping(replace(config, resume=False))  # type: ignore[arg-type]


# The stages


def stages_of(verb: str, config: PipelineConfig, folder: Path) -> list[Stage]:
    """Return all stages, in order."""
    recipe, initial = RECIPES[verb], config.model.path
    stages: list[Stage] = held_out_stages(config, folder / "iteration-0", initial, "")
    model, rows = initial, ""
    for number in range(1, config.iterations + 1):
        directory = folder / f"iteration-{number}"
        if config.generate.samples_per_prompt:
            stages.append(
                Generate(generation(config, number, model, directory), best_of=rows if recipe.conditional else "")
            )
            completions = str(directory / "answers.jsonl")
        else:
            (completions,) = config.data.train
        scores = scoring(config, completions, str(directory / "scored.jsonl"), normalize=recipe.conditional)
        rows = str(directory / "selected.jsonl")
        values = (config.condition_template,) if recipe.conditional else ()
        stages += [
            Score(scores),
            Select(method=recipe.method, file=scores.out, out=Path(rows), values=values),
            Train(verb=recipe.trainer, out=directory / "model", options=training(config, recipe, number, model, rows)),
        ]
        model = str(directory / "model")
        stages += held_out_stages(config, directory, model, rows if recipe.conditional else "")
    return stages


def generation(config: PipelineConfig, number: int, model: str, directory: Path) -> Generation:
    """Return the generation settings of an iteration; each iteration has its own seed."""
    options = config.generate
    return Generation(
        model=generation_model(config, model),
        data=replace(config.data, eval=(), on_overlong="drop" if config.data.on_overlong == "drop" else "error"),
        out=str(directory / "answers.jsonl"),
        sampling=sampling(config, options.temperature),
        n=options.samples_per_prompt,
        seed=seed_for(config.seed, number, 0),
        window=(number, config.prompts_per_iteration) if config.prompts_per_iteration else None,
        around=bool(config.prompts_per_iteration),
        condition_template=config.condition_template,
        batch=options.batch_size,
        engine=EngineSpec(options.engine, options.vllm_options),
        cluster=config.cluster,
        section="generate.",
    )


def held_out_stages(config: PipelineConfig, directory: Path, model: str, best_of: str) -> list[Stage]:
    """Return the stages that evaluate a model on held-out prompts, always with the same seed."""
    if not config.data.eval:
        return []
    settings = replace(
        generation(config, 0, model, directory),
        data=replace(config.data, train=config.data.eval, eval=(), weights=(), max_examples=0, on_overlong="error"),
        out=str(directory / "held-out.jsonl"),
        sampling=sampling(config, config.eval.temperature),
        n=config.eval.samples_per_prompt,
        window=None,
        around=False,
    )
    scores = scoring(config, settings.out, str(directory / "held-out-scored.jsonl"))
    return [Generate(settings, best_of=best_of), Score(scores)]


def generation_model(config: PipelineConfig, path: str) -> ModelConfig:
    """Return how a model of the pipeline is loaded to generate: without adapters to train."""
    options = config.model
    return ModelConfig(path=path, tokenizer=options.tokenizer, dtype=options.dtype, load_in_4bit=options.load_in_4bit)


def sampling(config: PipelineConfig, temperature: float) -> Sampling:
    return replace(Sampling.of(config.generate), temperature=temperature)


def scoring(config: PipelineConfig, file: str, out: str, normalize: bool = False) -> Scoring:
    options = config.reward
    return Scoring(
        file=file,
        out=out,
        reward=options.functions,
        weights=options.weights,
        normalize=normalize,
        timeout_seconds=options.timeout_seconds,
        memory_gib=options.memory_gib,
        workers=options.workers,
        max_failure_rate=options.max_failure_rate,
        env=options.env,
        allow_unprotected_code=options.allow_unprotected_code,
        map_keys={} if config.generate.samples_per_prompt else config.data.map_keys,
        max_rows=None if config.generate.samples_per_prompt else config.data.max_examples or None,
        model=ModelConfig(dtype=config.model.dtype),
        data=DataConfig(chat_template=options.model_chat_template, max_length=longest(config)),
    )


def longest(config: PipelineConfig) -> int:
    """Return the maximum length of a conversation, large enough that no completion is truncated."""
    return config.data.max_length + (
        config.generate.max_tokens + TEMPLATE_TOKENS if config.generate.samples_per_prompt else 0
    )


def training(config: PipelineConfig, recipe: Recipe, number: int, model: str, rows: str) -> Config:
    """Return the options of the trainer in this iteration."""
    algo = config.algo
    if recipe.trainer == "dpo" and number > 1 and not algo.reference:
        algo = replace(algo, reference=config.model.path)  # the initial policy, every time
    return replace(
        with_algorithm(ALGORITHMS[recipe.trainer]),
        seed=seed_for(config.seed, number, 1),
        model=replace(config.model, path=model),
        data=DataConfig(
            train=(rows,),
            chat_template=config.data.chat_template,
            max_length=longest(config),
            shuffle=config.data.shuffle,
        ),
        train=config.train,
        save=config.save,
        log=config.log,
        cluster=config.cluster,
        algo=algo,
    )


# The result


def last_model(folder: Path, iterations: int) -> Path:
    """Link `model` in the run directory to the last model, so that the directory can be used as a model."""
    link, unfinished = folder / "model", folder / ".tmp-model"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(f"iteration-{iterations}/model", target_is_directory=True)
    unfinished.replace(link)
    return link
