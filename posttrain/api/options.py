"""Types and documentation of the arguments that functions and trainers share.

A function takes most of its arguments as `**options: Unpack[TrainingOptions]`, so that type checkers and editors know
each of them; `documented` shows them in its signature and docstring, so that help() does, too.
"""

from __future__ import annotations

import ast
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Protocol, TypedDict, TypeVar

from posttrain.train.callbacks import Callback

F = TypeVar("F", bound=Callable[..., Any])


class LoadedModel(Protocol):
    """A model of transformers that is in memory."""

    config: Any

    def save_pretrained(self, save_directory: Any) -> Any: ...

    def named_parameters(self) -> Any: ...


class LoadedTokenizer(Protocol):
    """A tokenizer of transformers that is in memory."""

    def save_pretrained(self, save_directory: Any) -> Any: ...


class PeftSettings(Protocol):
    """A configuration of peft, such as LoraConfig."""

    peft_type: Any


PathLike = str | os.PathLike[str]
Section = Mapping[str, Any]
Examples = Iterable[Mapping[str, Any]]
Model = PathLike | LoadedModel | Section
Data = PathLike | Examples | Sequence[PathLike | Examples] | Section
RewardFunction = str | Callable[..., Any]
Reward = RewardFunction | Sequence[RewardFunction] | Section
ConfigFile = PathLike | Section

ARGUMENTS = {
    "model": "directory, Hugging Face name, run directory or `pico` (a toy model); a loaded model of transformers, "
    "with `tokenizer`; or the section `model` as a dict",
    "data": "files, directories or dataset names; examples in memory: a list of dicts or a datasets.Dataset; or the "
    "section `data` as a dict",
    "reward": "what scores completions: names of verifiers, Python functions (also of a notebook cell), "
    "FILE.py:FUNCTION, model:PATH, http://..., or several of these; or the section `reward` as a dict",
    "config": "YAML file or dict of sections; the other arguments win over it",
}


class TrainingOptions(TypedDict, total=False):
    """Arguments of every trainer; what is left out has the default of the command line."""

    eval_data: Annotated[Data | None, "examples to evaluate on, given like `data`"]
    tokenizer: Annotated[str | LoadedTokenizer | None, "directory, Hugging Face name or loaded tokenizer"]
    peft_config: Annotated[PeftSettings | None, "peft.LoraConfig: trains LoRA adapters instead of all weights"]
    output_dir: Annotated[PathLike | None, "run directory; default: the next free runs/<verb>-NNN"]
    resume: Annotated[bool | None, "continue the run in output_dir, with its own configuration"]
    allow_changed_data: Annotated[bool | None, "with resume: continue although data, seed or data.shuffle changed"]
    seed: Annotated[int | None, "seed of data order, initialisation, sampling and dropout"]
    quiet: Annotated[bool | None, "print only warnings, errors and the last line"]
    max_steps: Annotated[int | None, "number of optimizer steps; 0: as many as `epochs` needs"]
    epochs: Annotated[float | None, "passes over the examples when max_steps is 0"]
    batch_size: Annotated[int | None, "examples per step; prompts per step for online trainers"]
    learning_rate: Annotated[float | None, "peak learning rate"]
    max_length: Annotated[int | None, "longest sequence in tokens; of online trainers, the longest prompt"]
    lora_rank: Annotated[int | None, "rank of LoRA adapters; 0 trains all weights"]
    devices: Annotated[int | None, "worker processes, one per device"]
    callbacks: Annotated[Sequence[Callback] | None, "objects of posttrain.Callback, called by the training process"]
    metrics: Annotated[
        Mapping[str, Callable[[Any], float]] | None,
        "custom metrics by name: functions of the rollouts of a step (online), or of the predictions of an evaluation",
    ]
    train: Annotated[Section | None, "section `train`: the optimizer, its schedule and the batch"]
    algo: Annotated[Section | None, "section `algo`: options of the algorithm"]
    eval: Annotated[Section | None, "section `eval`: when and how to evaluate"]
    save: Annotated[Section | None, "section `save`: when to save, which checkpoints to keep"]
    log: Annotated[Section | None, "section `log`: trackers"]
    cluster: Annotated[Section | None, "section `cluster`: devices, and how models are divided among them"]


class OnlineOptions(TrainingOptions, total=False):
    """Arguments of trainers that learn from their own completions."""

    samples_per_prompt: Annotated[int | None, "completions per prompt and step"]
    max_tokens: Annotated[int | None, "longest completion in tokens"]
    temperature: Annotated[float | None, "sampling temperature"]
    rollout: Annotated[Section | None, "section `rollout`: how completions are generated"]


class PipelineOptions(TypedDict, total=False):
    """Arguments of pipelines, which generate, score, select and train in turns."""

    eval_data: Annotated[Data | None, "prompts to evaluate on, given like `data`"]
    output_dir: Annotated[PathLike | None, "directory; needed if examples are in memory"]
    seed: Annotated[int | None, "seed of completions, data order and initialisation"]
    quiet: Annotated[bool | None, "print one line per stage"]
    iterations: Annotated[int | None, "how often to generate, score, select and train"]
    generate: Annotated[Section | None, "section `generate`: how completions are generated"]
    train: Annotated[Section | None, "section `train`: the optimizer, its schedule and the batch"]
    algo: Annotated[Section | None, "section `algo`: options of the algorithm"]
    eval: Annotated[Section | None, "section `eval`: how to evaluate"]
    save: Annotated[Section | None, "section `save`: which checkpoints to keep"]
    log: Annotated[Section | None, "section `log`: trackers"]
    cluster: Annotated[Section | None, "section `cluster`: devices"]


OPTION_OF = {
    "max_steps": "train.max_steps",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "learning_rate": "train.learning_rate",
    "max_length": "data.max_length",
    "lora_rank": "model.lora_rank",
    "devices": "cluster.devices",
    "samples_per_prompt": "rollout.samples_per_prompt",
    "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature",
}
"""Arguments that are short for `section.option`."""


@cache
def option_docs(options: type) -> dict[str, tuple[str, str]]:
    """Return name -> (type as written, description) of the keys of a TypedDict."""
    found = {}
    for name, annotation in options.__annotations__.items():
        written = ast.parse(annotation.__forward_arg__, mode="eval").body
        assert isinstance(written, ast.Subscript) and isinstance(written.slice, ast.Tuple)
        kind, text = written.slice.elts
        found[name] = ast.unparse(kind), str(ast.literal_eval(text))
    return found


def documented(options: type) -> Callable[[F], F]:
    """Decorator: shows the keys of `options` in the signature and docstring of a function that takes **options."""
    keys = option_docs(options)

    def document(function: F) -> F:
        signature = inspect.signature(function)
        named = [entry for entry in signature.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
            for name, (kind, _) in keys.items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *added])  # type: ignore[attr-defined]
        texts = {entry.name: ARGUMENTS[entry.name] for entry in named if entry.name in ARGUMENTS}
        texts |= {name: text for name, (_, text) in keys.items()}
        lines = "\n".join(f"    {name}: {text}" for name, text in texts.items())
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nArguments:\n{lines}\n"
        return function

    return document
