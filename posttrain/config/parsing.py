"""How options are read: from the command line, a YAML file or Python, with errors that name the fix.

One parser (tyro) reads them all: a file's entries are turned into options and put before those typed by the user,
so types, choices and error messages are the same wherever a value comes from.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import difflib
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from posttrain.config.sections import Config, OnlineConfig, check, value_of, with_algorithm
from posttrain.core.errors import UsageError

DEFAULTS = "defaults"  # the entry of a file that names files to read before it
SPELLINGS = {"shuffle_minibatch": "shuffle_mini_batch"}  # options of other libraries that differ in a letter
RENAMED = {  # in files of old
    ("rewards.normalize_models", "False"): ("rewards.normalize", "none"),
    ("rewards.normalize_models", "True"): ("rewards.normalize", "saved"),
}
ELSEWHERE = {  # options of other libraries -> what does the same here, to be named when one is typed
    "lr": "update.learning_rate",
    "batch_size": "update.rows_per_step",
    "train_batch_size": "update.rows_per_step",
    "gradient_accumulation_steps": "update.rows_per_step",
    "per_device_train_batch_size": "update.tokens_per_device",
    "micro_train_batch_size": "update.tokens_per_device",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "output_dir": "out",
    "save_path": "out",
    "resume_from_checkpoint": "resume",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "device": "cluster.devices",
    "num_gpus": "cluster.devices",
    "n_gpus_per_node": "cluster.devices",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "gradient_checkpointing": "model.checkpoint_activations",
    "lora_r": "model.lora_rank",
    "target_modules": "model.lora_targets",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "train_files": "data.train",
    "val_files": "data.eval",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "cutoff_len": "data.max_tokens",
    "chat_template": "data.template",
    "lr_scheduler_type": "update.schedule",
    "warmup_steps": "update.warmup",
    "warmup_ratio": "update.warmup",
    "save_steps": "save.every",
    "save_total_limit": "save.keep",
    "eval_steps": "eval.every",
    "report_to": "log.to",
    "reward_funcs": "reward",
    "normalize_models": "rewards.normalize",
    "normalize_reward": "rewards.normalize",
    "scale_reward": "rewards.normalize",
    "num_generations": "rollout.samples_per_prompt",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "kl_coef": "algo.kl",
    "num_iterations": "algo.epochs_per_batch",
    "ref_model": "algo.reference",
    "loss_type": "algo.loss",
}


def parse(verb: str, algorithm: Any, args: Sequence[str], *, data: bool = True) -> Config:
    """`[CONFIG.yaml] --section.option value ...` -> a checked configuration; wrong use exits with 2.

    `data`: whether there must be some.
    """
    file, typed = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    start = with_algorithm(algorithm)
    filed = entries_of_file(Path(file), start, verb) if file else []
    typed = [respelled(word) if word[:2] == "--" else word for word in typed]
    return read_options(verb, algorithm.help, start, filed, typed, data=data)


def from_mapping(verb: str, algorithm: Any, mapping: dict[str, Any]) -> Config:
    """The same from Python: {"model": {"path": "pico"}, "steps": 5}."""
    start = with_algorithm(algorithm)
    entries = [Entry("", respelled(key), value) for key, value in flatten(mapping).items()]
    for entry in entries:
        check_key(entry.key, start, "")
    return read_options(verb, algorithm.help, start, entries, [])


def respelled(key: str) -> str:
    """An option under the name it has here; `--section.no_option` too."""
    section, dot, name = key.rpartition(".")
    no = "no_" * name.startswith("no_")
    return f"{section}{dot}{no}{SPELLINGS.get(name.removeprefix(no), name.removeprefix(no))}"


class Entry(NamedTuple):
    """A value that was not typed: from a file, or from Python."""

    where: str  # `file:line: `, or empty
    key: str
    value: Any


def read_options(
    verb: str, help: str, start: Config, entries: Sequence[Entry], typed: list[str], *, data: bool = True
) -> Config:
    judge = " --reward gsm8k" if isinstance(start, OnlineConfig) else ""
    about = (
        f"{help}.\n\nposttrain {verb} --model.path MODEL --data.train ROWS.jsonl{judge}\n\n"
        f"A file may come first: posttrain {verb} CONFIG.yaml --section.option value ..."
    )
    return check(read_entries(f"posttrain {verb}", about, start, entries, typed), data=data)


def parse_plain(command: str, about: str, start: Any, args: Sequence[str]) -> Any:
    """`[CONFIG.yaml] --option value ...` for a command whose options have no sections: a dataclass like `start`."""
    file, typed = (args[0], args[1:]) if args and not args[0].startswith("-") else (None, args)
    about += f"\n\nA file may come first: posttrain {command} CONFIG.yaml --option value ..."
    entries = entries_of_file(Path(file), start, command) if file else []
    return read_entries(f"posttrain {command}", about, start, entries, list(typed))


def read_entries(prog: str, about: str, start: Any, entries: Sequence[Entry], typed: list[str]) -> Any:
    """The options of `start`, changed by the entries and then by what was typed."""
    import tyro  # here, so that `posttrain --help` stays quick

    def read(options: list[str]) -> Any:
        return tyro.cli(type(start), args=options, default=start, prog=prog, description=about, use_underscores=True)

    def works(entries: Sequence[Entry]) -> Any:
        """The parser speaks of options, but these were not typed: what it says of them is not shown."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return read(as_options(entries))
        except SystemExit:
            return None

    without_typed = works(entries) if entries else start
    if without_typed is None:
        counts = range(1, len(entries) + 1)
        first = bisect.bisect_left(counts, True, key=lambda count: works(entries[:count]) is None)
        wrong = entries[first]
        raise UsageError(f"{wrong.where}{wrong.key} is {wrong.value!r}; it must be {type_of(start, wrong.key)}.")
    if not typed:
        return without_typed
    check_typed(typed, start, prog)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return read(as_options(entries) + typed)
    except SystemExit as end:
        if not end.code:  # --help
            raise
    groups = [list(group) for group in by_option(typed)]
    counts = range(1, len(groups) + 1)
    first = bisect.bisect_left(counts, True, key=lambda count: not parses(read, list(chain(*groups[:count]))))
    raise UsageError(wrong_value(groups[min(first, len(groups) - 1)], start, prog))


def parses(read: Callable[[list[str]], Any], options: list[str]) -> bool:
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            read(options)
    except SystemExit:
        return False
    return True


def by_option(typed: Sequence[str]) -> Iterator[list[str]]:
    """Each option with its values; `--option=value` is two words then."""
    group: list[str] = []
    for word in typed:
        if word.startswith("--"):
            if group:
                yield group
            name, is_, value = word.partition("=")
            group = [name, value] if is_ else [name]
        else:
            group.append(word)
    if group:
        yield group


def check_typed(typed: Sequence[str], start: Any, prog: str) -> None:
    """Options that are typed exist; what the parser itself would say of others is longer and knows less."""
    known = option_keys(start)
    switches = {no_option(key) for key in known if isinstance(value_of(start, key), bool)}
    for name, *values in by_option(typed):
        if name == "-h":
            continue
        for word in (name, *values) if name.startswith("--") else (name,):
            if not word.startswith("--") and (word == name or re.fullmatch(r"-[a-zA-Z][\w.]+", word)):
                raise UsageError(f"{word}: options begin with --, as --steps 10. {prog} --help lists them.")
        key = name[2:].replace("-", "_")
        if key not in switches and key != "help":
            check_key(key, start, "", dashes="--")


def no_option(key: str) -> str:
    section, dot, name = key.rpartition(".")
    return f"{section}{dot}no_{name}"


def wrong_value(group: list[str], start: Any, prog: str) -> str:
    """What is wrong with an option and what was typed after it."""
    name, *values = group
    key = name[2:].replace("-", "_")
    files = [value for value in values if value.endswith((".yaml", ".yml"))]
    if files:
        return f"{files[0]}: a configuration file comes first: {prog} {files[0]} {name} ..."
    if key not in option_keys(start) or isinstance(value_of(start, key), bool):
        key = key if key in option_keys(start) else key.replace("no_", "", 1)
        return (
            f"{name} is a switch and takes no value: write --{key} or --{no_option(key)}, without {' '.join(values)!r}."
        )
    if not values:
        return f"{name} has no value; it must be {type_of(start, key)}."
    return f"{name} is {' '.join(values)!r}; it must be {type_of(start, key)}."


WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
WORDS |= {"tuple[float, ...]": "a list of numbers", "tuple[int, float]": "a whole number and a number"}
WORDS |= {"int | None": "a whole number", "tuple[str, ...]": "a list of texts", "tuple[float, float]": "two numbers"}
WORDS |= {"tuple[float, float, float]": "three numbers"}


def type_of(config: Any, key: str) -> str:
    """What an option takes, in words."""
    *section, name = key.split(".")
    holder = value_of(config, section[0]) if section else config
    written = next(str(entry.type) for entry in dataclasses.fields(holder) if entry.name == name)
    choices = written.partition("Literal[")[2].partition("]")[0]
    return WORDS.get(written) or f"{'any' if written.startswith('tuple') else 'one'} of {choices}"


def flatten(mapping: dict[str, Any]) -> dict[str, Any]:
    """{"model": {"path": "pico"}} -> {"model.path": "pico"}; keys with a dot are taken as they are."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


def read_yaml(file: Path) -> yaml.MappingNode | None:
    """The file's entries with their places in it; None if it is empty."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such configuration file") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        tab = "; a tab: indent with spaces" if "'\\t'" in str(error) else ""
        raise UsageError(f"{file}: cannot be read as YAML{tab}: {error}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{file}: must hold `section:` entries, not a {root.id}")
    return root


def verb_of_file(file: Path) -> str:
    """The value of the entry `verb`, or "" ."""
    root = read_yaml(file)
    return next((str(value.value) for key, value in root.value if key.value == "verb"), "") if root else ""


def entries_of_file(file: Path, start: Config, verb: str, inside: tuple[Path, ...] = ()) -> list[Entry]:
    """Entries of a YAML file with their places in it, after those of the files that it names under `defaults`.

    An unknown key is reported with its line. `inside`: the files that led to this one.
    """
    root = read_yaml(file)
    entries: list[Entry] = []
    constructor = yaml.SafeLoader("")
    for key_node, value_node in root.value if root else []:
        if key_node.value == "verb":
            if value_node.value != verb:
                raise UsageError(f"{file}: is for `posttrain {value_node.value}`, not for `posttrain {verb}`")
            continue
        if key_node.value == DEFAULTS:
            inside = (*inside, file.resolve())
            entries = [
                entry
                for other in files_before(file, value_node)
                for entry in entries_before(other, start, verb, inside)
            ] + entries
            continue
        pairs = [(str(key_node.value), key_node, value_node)]
        if isinstance(value_node, yaml.MappingNode) and key_node.value not in option_keys(start):  # a section
            pairs = [(f"{key_node.value}.{k.value}", k, v) for k, v in value_node.value]
        for key, node, value in pairs:
            where = f"{file}:{node.start_mark.line + 1}: "
            key = respelled(key)
            try:
                said = constructor.construct_object(value, deep=True)
                key, said = RENAMED.get((key, str(said)), (key, said))
                check_key(key, start, where)
                entries.append(Entry(where, key, said))
            except (yaml.YAMLError, ValueError) as error:
                raise UsageError(f"{where}{key}: cannot be read: {str(error).splitlines()[0]}") from None
    return entries


def files_before(file: Path, node: yaml.Node) -> list[Path]:
    """What a file names under `defaults`: one file or several, from where it lies."""
    names = [entry.value for entry in node.value] if isinstance(node, yaml.SequenceNode) else [node.value]
    if not all(isinstance(name, str) for name in names):
        raise UsageError(f"{file}:{node.start_mark.line + 1}: defaults must be files, as [base.yaml, model.yaml]")
    return [file.parent / name for name in names]


def entries_before(file: Path, start: Config, verb: str, inside: tuple[Path, ...]) -> list[Entry]:
    if file.resolve() in inside:
        raise UsageError(f"{inside[-1]}: defaults: {file} is the file itself, or one that names it")
    return entries_of_file(file, start, verb, inside)


def option_keys(config: Any, prefix: str = "") -> list[str]:
    """All options of a configuration, as `section.option`."""
    keys: list[str] = []
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        keys += option_keys(value, f"{entry.name}.") if dataclasses.is_dataclass(value) else [prefix + entry.name]
    return keys


def check_key(key: str, start: Config, where: str, dashes: str = "") -> None:
    known = option_keys(start)
    if key in known:
        return
    elsewhere = ELSEWHERE.get(key.split(".")[-1], "")
    if elsewhere in known:
        raise UsageError(f"{where}{dashes}{key}: no such option; here it is {dashes}{elsewhere}.")
    by_last = [k for k in known if k.split(".")[-1] == key.split(".")[-1]]
    near = by_last or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean {dashes}{near[0]}?" if near else "posttrain <verb> --help lists all options."
    raise UsageError(f"{where}{dashes}{key}: no such option. {hint}")


def as_options(entries: Sequence[Entry]) -> list[str]:
    """Keys and their values as they would be typed."""
    options: list[str] = []
    for _, key, value in entries:
        section, dot, option = key.rpartition(".")
        if isinstance(value, bool):
            options.append(f"--{key}" if value else f"--{section}{dot}no_{option}")
        elif isinstance(value, list | tuple):
            options += [f"--{key}", *map(str, value)]
        elif isinstance(value, dict):  # an option that takes JSON
            options += [f"--{key}", json.dumps(value, ensure_ascii=False)]
        else:
            options += [f"--{key}", str(value)]
    return options
