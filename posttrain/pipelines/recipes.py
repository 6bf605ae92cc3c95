"""The pipelines that are commands: rejection sampling, iterative DPO, conditional fine-tuning.

Each repeats generate -> score -> select -> train, every iteration with the model of the previous one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.algorithms import ALGORITHMS
from posttrain.config.sections import Config, DataConfig, ModelConfig, as_mapping, with_algorithm
from posttrain.core.errors import Stopped, UsageError
from posttrain.core.files import atomic_write_json
from posttrain.data.reading.sources import source_parts
from posttrain.engines.base import EngineSpec, Sampling, seed_for
from posttrain.inference.generate import Generation
from posttrain.inference.model import fill_condition
from posttrain.inference.score import Scoring
from posttrain.models.paths import resolve_path
from posttrain.pipelines.settings import RECIPES, PipelineConfig, Recipe, from_options
from posttrain.pipelines.stage import REPORT, Figures, Stage, open_folder, run_in
from posttrain.pipelines.stages import Generate, Score, Select, Train, best_reward
from posttrain.pipelines.summary import by_iteration, closing_words
from posttrain.train.reward_model import check_reward_model

ROOM = 64  # tokens of a chat template and of a condition around prompt and answer
FREE = (
    "iterations",
    "output_dir",
    "quiet",
    "resume",
    "score.workers",
    "log.",
    "save.",
    "cluster.",
    "generate.engine",
    "generate.vllm_options",
)
"""Stages know themselves what of the last two decides what they make."""


@dataclass(slots=True)
class PipelineResult:
    """The result of a finished pipeline, for Python."""

    folder: Path
    model: Path
    iterations: list[Figures]  # iteration 0: the model as it was


def run(verb: str, /, say: Callable[[str], None] = print, **options: Any) -> PipelineResult:
    """`posttrain <verb>` from Python: options as nested dicts, as in the YAML file."""
    return run_from(verb, from_options(verb, options), say)


def run_from(verb: str, config: PipelineConfig, say: Callable[[str], None] = print) -> PipelineResult:
    """Run all iterations; finished stages are skipped."""
    check(verb, config)
    with open_folder(verb, config.output_dir, described(config), FREE) as folder:
        stages = stages_of(verb, config, folder.path)
        try:
            figures = run_in(folder.path, stages, quiet=config.quiet, say=say)
        except Stopped as stopped:
            words = str(stopped).partition(" Resume:")[0]
            raise Stopped(f"{words} Resume: the same command", stopped.exit_code - 128) from stopped
        except KeyboardInterrupt:
            say("\nstopped; go on: the same command")
            raise
        table = by_iteration(stages, figures)
        atomic_write_json(folder.path / REPORT, table)
        model = last_model(folder.path, config.iterations)
        condition = None
        if RECIPES[verb].conditional:
            condition = best_reward(str(folder.path / f"iteration-{config.iterations}/selected.jsonl"))
        for line in closing_words(table, folder.path, condition, config.condition_template):
            say(line)
        return PipelineResult(folder.path, model, table)


# Before anything is made


def check(verb: str, config: PipelineConfig) -> None:
    """UsageError for what cannot work, before anything is loaded."""
    recipe, data, n = RECIPES[verb], config.data, config.generate.n
    names = "the names of verifiers, FILE.py:FUNCTION, model:PATH or http://..."
    for problem, message in (
        (not config.reward, f"reward is not set: what judges answers? Give {names}: --reward gsm8k"),
        (not data.train, "data.train is not set. Name the files with prompts: --data.train questions.jsonl"),
        (config.iterations < 1, f"iterations is {config.iterations}; it must be at least 1."),
        (config.prompts < 0, f"prompts is {config.prompts}; it must be at least 0."),
        (
            n < recipe.fewest,
            f"generate.n is {n}; {verb} compares the answers to a prompt: give it at least {recipe.fewest}.",
        ),
        (
            n == 0 and config.iterations > 1,
            f"generate.n is 0: the data's own answers stay the same, so iterations must be 1, not {config.iterations}.",
        ),
        (
            n == 0 and (len(data.train) != 1 or bool(config.prompts)),
            "generate.n is 0: the answers that the data has are scored. Name one file, and leave prompts out.",
        ),
        (config.eval.n < 1, f"eval.n is {config.eval.n}; it must be at least 1."),
        (
            bool(data.eval_fraction),
            "data.eval_fraction: a pipeline takes files: --data.eval FILE",
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


def described(config: PipelineConfig) -> dict[str, Any]:
    return as_mapping(replace(config, resume=False))  # type: ignore[arg-type]


# The stages


def stages_of(verb: str, config: PipelineConfig, folder: Path) -> list[Stage]:
    """Return all stages, in order."""
    recipe, initial = RECIPES[verb], config.model.path
    stages: list[Stage] = held_out(config, folder / "iteration-0", initial, "")
    model, rows = initial, ""
    for number in range(1, config.iterations + 1):
        place = folder / f"iteration-{number}"
        if config.generate.n:
            stages.append(
                Generate(generation(config, number, model, place), best_of=rows if recipe.conditional else "")
            )
            answers = str(place / "answers.jsonl")
        else:
            (answers,) = config.data.train
        judged = scoring(config, answers, str(place / "scored.jsonl"), normalize=recipe.conditional)
        rows = str(place / "selected.jsonl")
        values = (config.condition_template,) if recipe.conditional else ()
        stages += [
            Score(judged),
            Select(method=recipe.method, file=judged.out, out=Path(rows), values=values),
            Train(verb=recipe.trainer, out=place / "model", options=training(config, recipe, number, model, rows)),
        ]
        model = str(place / "model")
        stages += held_out(config, place, model, rows if recipe.conditional else "")
    return stages


def generation(config: PipelineConfig, number: int, model: str, place: Path) -> Generation:
    """Return the generation settings of an iteration; each iteration has its own seed."""
    options = config.generate
    return Generation(
        model=asked_model(config, model),
        data=replace(config.data, eval=(), on_overlong="drop" if config.data.on_overlong == "drop" else "error"),
        out=str(place / "answers.jsonl"),
        sampling=sampling(config, options.temperature),
        n=options.n,
        seed=seed_for(config.seed, number, 0),
        window=(number, config.prompts) if config.prompts else None,
        around=bool(config.prompts),
        condition_template=config.condition_template,
        batch=options.batch,
        engine=EngineSpec(options.engine, options.vllm_options),
        cluster=config.cluster,
    )


def held_out(config: PipelineConfig, place: Path, model: str, best_of: str) -> list[Stage]:
    """Return the stages that evaluate a model on held-out prompts, always with the same seed."""
    if not config.data.eval:
        return []
    asked = replace(
        generation(config, 0, model, place),
        data=replace(config.data, train=config.data.eval, eval=(), weights=(), max_examples=0, on_overlong="error"),
        out=str(place / "held-out.jsonl"),
        sampling=sampling(config, config.eval.temperature),
        n=config.eval.n,
        window=None,
        around=False,
    )
    return [Generate(asked, best_of=best_of), Score(scoring(config, asked.out, str(place / "held-out-scored.jsonl")))]


def asked_model(config: PipelineConfig, path: str) -> ModelConfig:
    how = config.model
    return ModelConfig(path=path, tokenizer=how.tokenizer, dtype=how.dtype, load_in_4bit=how.load_in_4bit)


def sampling(config: PipelineConfig, temperature: float) -> Sampling:
    options = config.generate
    return Sampling(
        max_tokens=options.max_tokens,
        temperature=temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        stop_texts=options.stop,
    )


def scoring(config: PipelineConfig, file: str, out: str, normalize: bool = False) -> Scoring:
    options = config.score
    return Scoring(
        file=file,
        out=out,
        reward=config.reward,
        weights=options.weights,
        normalize=normalize,
        timeout_seconds=options.timeout_seconds,
        memory_gib=options.memory_gib,
        workers=options.workers,
        max_failure_rate=options.max_failure_rate,
        map_keys={} if config.generate.n else config.data.map_keys,
        max_rows=None if config.generate.n else config.data.max_examples or None,
        model=ModelConfig(dtype=config.model.dtype),
        data=DataConfig(chat_template=options.template, max_length=longest(config)),
    )


def longest(config: PipelineConfig) -> int:
    """Return the maximum length of a conversation, large enough that no completion is truncated."""
    return config.data.max_length + (config.generate.max_tokens + ROOM if config.generate.n else 0)


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


# Afterwards


def last_model(folder: Path, iterations: int) -> Path:
    """Link `model` in the run directory to the last model, so that the directory can be used as a model."""
    link, unfinished = folder / "model", folder / ".tmp-model"
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(f"iteration-{iterations}/model", target_is_directory=True)
    unfinished.replace(link)
    return link
