"""Turns the arguments of the public functions into a checked configuration and the objects that a run is given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.algorithms import ALGORITHMS
from posttrain.api.options import OPTION_OF
from posttrain.config.parsing import flatten, from_mapping, option_keys, read_mapping
from posttrain.config.sections import Config, with_algorithm
from posttrain.core.errors import UsageError
from posttrain.core.files import atomic_write
from posttrain.pipelines.settings import PipelineConfig, pipeline_defaults
from posttrain.rewards.specs import reward_texts
from posttrain.train.callbacks import check_callbacks, check_metric_names
from posttrain.train.inputs import IN_MEMORY, RunInputs, as_json_lines
from posttrain.train.run_directory import find_run

FOREIGN = {
    "train_dataset": "data",
    "dataset": "data",
    "eval_dataset": "eval_data",
    "processing_class": "tokenizer",
    "reward_funcs": "reward",
    "reward_function": "reward",
    "args": "config",
    "compute_metrics": "metrics",
}
"""Arguments of other libraries' trainers, and what they are called here."""


class Arguments:
    """Collects arguments: options for the configuration, and objects that are not options."""

    def __init__(self, verb: str, known: Sequence[str]) -> None:
        self.verb, self.known = verb, known  # known: the options of the verb
        self.options: dict[str, Any] = {}
        self.examples: dict[str, Any] = {}
        self.model: Any = None
        self.tokenizer: Any = None

    def add(self, arguments: Mapping[str, Any]) -> None:
        """Add a mapping of sections, options and objects; None leaves a default."""
        for name, value in arguments.items():
            if value is None:
                continue
            if name in FOREIGN and name not in self.known:
                raise TypeError(f"{self.verb}: there is no argument {name!r}; here it is {FOREIGN[name]!r}")
            if name == "model":
                self.add_model(value)
            elif name == "data":
                self.add_data(value)
            elif name == "eval_data":
                self.options["data.eval"] = self.sources("eval", value)
            elif name == "reward":
                self.add_reward(value)
            elif name == "tokenizer":
                self.add_tokenizer(value)
            elif name == "peft_config":
                self.options |= lora_options(value)
            else:
                self.options |= flatten({OPTION_OF.get(name, name): path_as_text(value)}, self.known)

    def add_model(self, model: Any) -> None:
        if is_section(model):
            section = dict(model)
            self.add({"model": section.pop("path", None), "tokenizer": section.pop("tokenizer", None)})
            self.options |= flatten({"model": section}, self.known)
        elif hasattr(model, "save_pretrained"):
            check_model(model)
            self.model, self.options["model.path"] = model, f"{IN_MEMORY}model"
        else:
            self.model, self.options["model.path"] = None, path_text("model", model)

    def add_tokenizer(self, tokenizer: Any) -> None:
        if hasattr(tokenizer, "save_pretrained"):
            self.tokenizer = tokenizer
        else:
            self.tokenizer, self.options["model.tokenizer"] = None, path_text("tokenizer", tokenizer)

    def add_data(self, data: Any) -> None:
        if not is_section(data):
            self.options["data.train"] = self.sources("train", data)
            return
        section = dict(data)
        for name in ("train", "eval"):
            value = section.pop(name, None)
            if isinstance(value, int | float):  # a previous form: the share of examples to hold out
                section[name] = value
            elif value is not None:
                self.options[f"data.{name}"] = self.sources(name, value)
        self.options |= flatten({"data": section}, self.known)

    def add_reward(self, reward: Any) -> None:
        if not is_section(reward):
            option = "reward" if "reward" in self.known else "reward.functions"
            self.options[option] = reward_texts([reward] if is_one_reward(reward) else list(reward))
            return
        section = dict(reward)
        functions = section.pop("functions", None)
        if functions is not None:
            self.add_reward(functions)
        self.options |= flatten({"reward": section}, self.known)

    def sources(self, name: str, data: Any) -> list[str]:
        """Names of files; examples in memory are kept under a name that the run replaces by a file."""
        found = [data] if isinstance(data, str | os.PathLike) else list(self.parts(name, data))
        self.examples = {key: rows for key, rows in self.examples.items() if key.partition("-")[0] != name}
        texts: list[str] = []
        for number, part in enumerate(found):
            if isinstance(part, str | os.PathLike):
                texts.append(os.fspath(part))
                continue
            key = name if len(found) == 1 else f"{name}-{number + 1}"
            self.examples[key] = part
            texts.append(f"{IN_MEMORY}{key}")
        return texts

    def parts(self, name: str, data: Any) -> Iterator[Any]:
        """Yield the sources that `data` consists of: texts and collections of examples."""
        option = "data" if name == "train" else "eval_data"
        if isinstance(data, Mapping):
            splits = ", ".join(map(str, data))
            raise UsageError(f"{option}: it has several splits ({splits}): give one of them, as {option}=dataset[NAME]")
        if not isinstance(data, Iterable):
            raise UsageError(
                f"{option} is a {type(data).__name__}; it must be a file, a list of dicts or a datasets.Dataset"
            )
        if not isinstance(data, list | tuple):
            yield list(data) if isinstance(data, Iterator) else data
            return
        if all(isinstance(entry, Mapping) for entry in data):
            if data:
                yield data
            return
        for entry in data:
            if isinstance(entry, Mapping):
                raise UsageError(
                    f"{option}: examples and files in one list: give a list of lists of examples, or files"
                )
            yield entry

    def inputs(self, callbacks: Sequence[Any], metrics: Mapping[str, Any]) -> RunInputs:
        if self.model is not None and self.tokenizer is None:
            raise UsageError("a loaded model comes without its tokenizer: give tokenizer=")
        check_metric_names(metrics)
        return RunInputs(
            examples=self.examples,
            model=self.model,
            tokenizer=self.tokenizer,
            callbacks=check_callbacks(callbacks),
            metrics=dict(metrics),
            from_python=True,
        )


def prepare_run(verb: str, arguments: Mapping[str, Any]) -> tuple[Config, RunInputs]:
    """Return the configuration of a training verb and the objects that its run is given.

    With `resume` the configuration of the run in output_dir comes first, as on the command line.
    """
    algorithm = ALGORITHMS[verb]
    given = dict(arguments)
    config, callbacks, metrics = given.pop("config", None), given.pop("callbacks", ()), given.pop("metrics", {})
    collected = Arguments(verb, option_keys(with_algorithm(algorithm)))
    file: Path | None = None
    if isinstance(config, Mapping):
        collected.add(config)
    elif config is not None:
        file = Path(config)
    collected.add(given)
    if collected.options.get("resume") and file is None:
        run = find_run(str(collected.options.get("output_dir", "")), verb)
        file, collected.options["output_dir"] = run / "config.yaml", str(run)
    return from_mapping(verb, algorithm, collected.options, file), collected.inputs(callbacks or (), metrics or {})


def prepare_pipeline(verb: str, arguments: Mapping[str, Any]) -> PipelineConfig:
    """Return the configuration of a pipeline; examples in memory are written into its directory."""
    given = dict(arguments)
    defaults = pipeline_defaults(verb)
    collected = Arguments(verb, option_keys(defaults))
    config = given.pop("config", None)
    if isinstance(config, Mapping):
        collected.add(config)
    collected.add(given)
    if collected.model is not None or collected.tokenizer is not None:
        raise UsageError(f"{verb} takes the path of a model: save the loaded one with save_pretrained()")
    if collected.examples:
        collected.options |= written_examples(collected)
    file = Path(config) if config is not None and not isinstance(config, Mapping) else None
    return read_mapping(verb, verb, defaults, collected.options, file)


def written_examples(collected: Arguments) -> dict[str, Any]:
    """Write examples in memory to files of the pipeline's directory; return the options that name them."""
    folder = collected.options.get("output_dir")
    if not folder:
        raise UsageError("examples in memory are written into the pipeline's directory: give output_dir")
    directory = Path(folder) / "data"
    directory.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, rows in collected.examples.items():
        files[f"{IN_MEMORY}{name}"] = str(directory / f"{name}.jsonl")
        atomic_write(directory / f"{name}.jsonl", as_json_lines(rows))
    return {
        key: [files.get(name, name) for name in collected.options[key]]
        for key in ("data.train", "data.eval")
        if key in collected.options
    }


def is_section(value: Any) -> bool:
    """Whether an argument is the options of a section; a DatasetDict is a dict, too, but holds splits."""
    return isinstance(value, Mapping) and not type(value).__module__.startswith("datasets")


def is_one_reward(reward: Any) -> bool:
    return isinstance(reward, str) or callable(reward)


def path_text(argument: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise UsageError(
            f"{argument} must be a directory, a Hugging Face name or a loaded one, not {type(value).__name__}"
        )
    return os.fspath(value)


def path_as_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def check_model(model: Any) -> None:
    """Raise UsageError for a loaded model that cannot be trained as it is."""
    if hasattr(model, "peft_config") or hasattr(model, "merge_and_unload"):
        raise UsageError(
            "the model has adapters of peft: give the base model and peft_config, or the result of merge_and_unload()"
        )
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        raise UsageError(
            'the model is quantized: give its path instead, with model={"path": ..., "load_in_4bit": True}'
        )
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise UsageError(f"the model has no weights in memory: {name} is on the meta device")


LORA = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
INITIAL = {True: "zeros", "pissa": "pissa", "pissa_niter_16": "pissa_niter_16"}
"""peft's init_lora_weights -> model.lora_init."""
NOT_SETTINGS = {
    "target_modules",
    "task_type",
    "peft_type",
    "peft_version",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
}


def lora_options(peft_config: Any) -> dict[str, Any]:
    """Return the options of the section `model` for a peft.LoraConfig; refuse settings that have no counterpart."""
    kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
    if kind != "LORA":
        raise UsageError(f"peft_config is of type {kind}; only LoraConfig has a counterpart here")
    defaults = type(peft_config)()
    for entry in dataclasses.fields(peft_config):
        value = getattr(peft_config, entry.name)
        initial = entry.name == "init_lora_weights" and value in INITIAL
        if entry.name not in {*LORA, *NOT_SETTINGS} and not initial and value != getattr(defaults, entry.name):
            raise UsageError(f"peft_config.{entry.name} is {value!r}; it has no counterpart here: leave it out")
    modules = peft_config.target_modules
    if modules is None or (isinstance(modules, str) and modules != "all-linear"):
        raise UsageError(
            f"peft_config.target_modules is {modules!r}; it must be 'all-linear' or a list of names of modules"
        )
    targets = [modules] if isinstance(modules, str) else sorted(modules)
    options = {f"model.{ours}": getattr(peft_config, theirs) for theirs, ours in LORA.items()}
    init = INITIAL[peft_config.init_lora_weights]
    return options | {"model.lora_init": init, "model.lora_target_modules": targets}
