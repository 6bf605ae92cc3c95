"""Reads what users have of other libraries: YAML and JSON files, commands with their launcher, and shell scripts.

A script is never run: variables are replaced by the values that the script gives them, and the command in it is taken
apart as a shell would do it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from posttrain.config.foreign.answer import Use, uses_of_file, uses_of_words
from posttrain.config.foreign.axolotl import AXOLOTL
from posttrain.config.foreign.importing import Foreign
from posttrain.config.foreign.llama_factory import LLAMA_FACTORY
from posttrain.config.foreign.meanings import ONLINE, Library, number
from posttrain.config.foreign.mindformers import MINDFORMERS
from posttrain.config.foreign.mindrlhf import MINDRLHF, ONE_STAGE
from posttrain.config.foreign.mindspeed import MINDSPEED_LLM, MINDSPEED_RL
from posttrain.config.foreign.openrlhf import OPENRLHF, OPENRLHF_2024, OPENRLHF_2026
from posttrain.config.foreign.scripts import SCRIPTS, STARTERS, script_commands, text_of_file
from posttrain.config.foreign.trl import TRL
from posttrain.config.foreign.verl import VERL
from posttrain.config.yaml_nodes import compose_yaml, yaml_problem
from posttrain.core.errors import UsageError

CONFIG_FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Program:
    """A program of another library: how its words are recognised, and what it trains."""

    pattern: re.Pattern[str]
    libraries: tuple[Library, ...]
    verbs: tuple[str, ...] = ()
    config: str = ""
    """Option that names a configuration file; `first`: the first word does."""
    as_it_is: tuple[str, ...] = ()
    """Words of the command of posttrain that takes the same flags."""
    section: str = ""
    """Section of the configuration file that holds all its options."""


def program(
    pattern: str,
    *libraries: Library,
    verbs: Sequence[str] = (),
    config: str = "",
    as_it_is: str = "",
    section: str = "",
) -> Program:
    return Program(re.compile(pattern), libraries, tuple(verbs), config, tuple(as_it_is.split()), section)


SCRIPT_NAMES = {
    "sft": "sft",
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "cpo": "cpo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reward": "reward",
    "reward_modeling": "reward",
    "ppo": "ppo",
    "ppo_tldr": "ppo",
    "prm": "prm",
    "gkd": "distill",
}
"""TRL's scripts and commands -> verb."""
OPENRLHF_PROGRAMS = {
    "train_sft": ["sft", "pretrain"],
    "train_rm": ["reward"],
    "train_prm": ["prm"],
    "train_dpo": ["dpo"],
    "train_kto": ["kto"],
    "train_kd": ["distill"],
    "train_ppo": ["ppo"],
    "train_ppo_ray": ["ppo", *(verb for verb in ONLINE if verb != "ppo")],
    "batch_inference": ["generate", "score"],
    "interactive_chat": ["chat"],
}
PROGRAMS = (
    program(
        r"(.*/)?llamafactory-cli train|.*/src/train(_bash)?\.py|src/train(_bash)?\.py", LLAMA_FACTORY, config="first"
    ),
    program(r"(.*/)?axolotl train|axolotl\.cli\.train", AXOLOTL, config="first"),
    *(
        program(rf"(.*/)?trl {name}|(.*/)?{name}\.py|trl\.scripts\.{name}", TRL, verbs=[verb], config="config")
        for name, verb in SCRIPT_NAMES.items()
    ),
    program(
        r"verl\.trainer\.(main_ppo|main_ppo_sync|main)|(.*/)?main_ppo\.py|recipe\.\w+\.main_\w+",
        VERL,
        verbs=[],
        config="config_name",
    ),
    program(
        r"verl\.trainer\.(fsdp_)?sft_trainer|(.*/)?(fsdp_)?sft_trainer\.py", VERL, verbs=["sft"], config="config_name"
    ),
    program(r"(.*/)?cli/train_(grpo|dapo)\.py", MINDSPEED_RL, verbs=["grpo"], config="config_name"),
    program(r"(?!.*openrlhf/)(.*/)?cli/train_ppo\.py", MINDSPEED_RL, verbs=["ppo"], config="config_name"),
    program(
        r"(?!.*openrlhf/)(.*/)?cli/train_sft\.py", MINDSPEED_LLM, verbs=["sft"], config="config_name", section="sft"
    ),
    program(r"(.*/)?cli/train_orm\.py", MINDSPEED_LLM, verbs=["reward"], config="config_name", section="reward"),
    program(r"(.*/)?grpo_one_stage\.py", ONE_STAGE, verbs=["grpo"]),
    program(
        r"(.*/)?examples/grpo/.*main\.py|(.*/)?grpo_main\.py",
        MINDRLHF,
        verbs=["grpo"],
        config="config",
    ),
    program(r"(.*/)?run_(mindformer|qwen\w*|llama\w*|glm\w*|deepseek\w*)\.py", MINDFORMERS, config="config"),
    program(r"(.*/)?convert_ckpt\.py", MINDSPEED_LLM, as_it_is="convert"),
    program(r"(.*/)?preprocess_data\.py", MINDSPEED_LLM, as_it_is="data preprocess"),
    program(r"(.*/)?pretrain_gpt\.py", MINDSPEED_LLM, verbs=["pretrain"]),
    program(r"(.*/)?posttrain_gpt\.py", MINDSPEED_LLM),
    *(
        program(rf"(.*)openrlhf/cli/{name}\.py|openrlhf\.cli\.{name}", OPENRLHF, OPENRLHF_2026, verbs=verbs)
        for name, verbs in OPENRLHF_PROGRAMS.items()
    ),
    *(
        program(rf"(.*/)?{name}\.py", OPENRLHF_2024, OPENRLHF_2026, verbs=verbs)
        for name, verbs in OPENRLHF_PROGRAMS.items()
    ),
)
SUBCOMMANDS = ("llamafactory-cli", "axolotl", "trl")
DEVICE_COUNTS = ("num_processes", "nproc_per_node", "num_gpus", "worker_num")  # options of launchers
MACHINE_COUNTS = ("nnodes", "num_nodes")  # by which nproc_per_node and num_gpus are multiplied
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
SELECTED = {"rs": "rejection-sampling", "iter_dpo": "iterative-dpo", "ca": "conditional-sft"}
"""OpenRLHF's post-processors of scores -> pipeline."""
PREPROCESSING = {"input", "output_prefix", "handler_name"}
"""Keys of MindSpeed's configs/datasets/*.yaml, which `posttrain data preprocess` reads as they are."""
DATASET_FOLDERS = ("configs/datasets",)
NEEDLESS = {
    "rlhf_data.py": "not needed: the file that it converts is read as it is: --data.train FILE; posttrain data check "
    "FILE shows what it becomes",
    "convert_weight.py": "not needed: models are read from their Hugging Face directory: --model DIRECTORY",
    "transform_checkpoint.py": "not needed: Hugging Face directories are read for any number of devices",
}
"""Programs of MindRLHF and MindFormers that prepare files which are not needed here."""
LAUNCHED = "workers are started by cluster.devices, torchrun or srun"


class Command:
    """A command of another library: the launcher's words, the program and its arguments."""

    def __init__(self, words: Sequence[str]) -> None:
        self.launcher: list[str] = []
        self.program: Program | None = None
        self.name = ""
        self.arguments: list[str] = []
        self.rounds = getattr(words, "rounds", 0)
        for index, word in enumerate(words):
            count = 2 if Path(word).name in SUBCOMMANDS and index + 1 < len(words) else 1
            name = " ".join(words[index : index + count])
            found = next((known for known in PROGRAMS if known.pattern.fullmatch(name)), None)
            if found is None and Path(word).suffix in SCRIPTS and index < 2:
                return
            if found is not None:
                self.launcher, self.program, self.name = list(words[:index]), found, name
                self.arguments = list(words[index + count :])
                return

    def devices(self) -> int:
        """Return the number of devices that the launcher starts; 0 if it does not say it."""
        devices, machines = 0, 1
        for use in uses_of_words([word for word in self.launcher if word != "--"]):
            amount = round(number(use.value) or 0)
            if use.name in DEVICE_COUNTS and amount:
                devices = amount
            elif use.name in MACHINE_COUNTS and amount:
                machines = amount
            elif use.name in VISIBLE and isinstance(use.value, str):
                devices = devices or len([entry for entry in use.value.split(",") if entry])
            elif use.name == "include" and isinstance(use.value, str):  # deepspeed: host:0,1@host:0,1
                devices = sum(len(part.partition(":")[2].split(",")) for part in use.value.split("@"))
            elif use.name == "config_file" and isinstance(use.value, str):
                settings = {entry.name: entry.value for entry in uses_of_file(Path(use.value), ())}
                devices = devices or round(number(settings.get("num_processes")) or 0)
        return devices * machines


def read_foreign(words: Sequence[str]) -> Foreign | list[str]:
    """Read a file, a script or a command; a list: the words of the command of posttrain that takes it as it is."""
    first = words[0]
    if len(words) == 1 and any(letter.isspace() for letter in first) and not Path(first).exists():
        return foreign_of_command(script_commands(first, "the command"), "the command")
    if Path(first).suffix in SCRIPTS:
        return foreign_of_command(script_commands(text_of_file(Path(first)), first, Path(first)), first)
    if Path(first).suffix in CONFIG_FILES and not (len(words) > 1 and Command(words).program):
        uses = uses_of_config(Path(first))
        if {use.name for use in uses} >= PREPROCESSING:
            return ["data", "preprocess", *words]
        return foreign_of_file(first, [*uses, *uses_of_words(words[1:])])
    starts_script = len(words) > 1 and first in STARTERS and Path(words[1]).suffix in SCRIPTS
    commands = script_commands(shlex.join(words), "the command") if starts_script else [list(words)]
    return foreign_of_command(commands, "the command")


def foreign_of_file(name: str, uses: list[Use]) -> Foreign:
    """Return the entries of a file; of MindSpeed-RL's files for SFT and reward models those of their one section."""
    found = Foreign(name=name, uses=uses, directory=str(Path(name).parent))
    for section, verb in (("sft", "sft"), ("reward", "reward")):
        if any(use.name == f"{section}.stage" for use in uses):
            found.uses, found.libraries, found.verbs = without_section(uses, section), (MINDSPEED_LLM,), (verb,)
    return found


def without_section(uses: Sequence[Use], section: str) -> list[Use]:
    return [use._replace(name=use.name.removeprefix(f"{section}.")) for use in uses]


def foreign_of_command(commands: Iterable[Sequence[str]], where: str) -> Foreign | list[str]:
    """Return the one command of another library among the commands of a script."""
    seen = list(commands)
    found = [(command, list(words)) for words in seen if words[0] != "echo" and (command := Command(words)).program]
    distinct = {shlex.join(words): command for command, words in found}
    if not distinct and (reason := needless_reason(seen)):
        raise UsageError(f"{where}: {reason}")
    if not distinct:
        raise UsageError(
            f"{where}: no program of a known library. Known are llamafactory-cli train, axolotl train, trl sft and the "
            "like, verl.trainer.main_ppo, openrlhf.cli.train_sft and the like, cli/train_grpo.py, grpo_one_stage.py."
        )
    if len(distinct) > 1 and (pipeline := pipeline_of(list(distinct.values()), where)):
        return pipeline
    if len(distinct) > 1:
        raise UsageError(
            f"{where}: has {len(distinct)} commands; import them one by one, in quotes:\n"
            + "\n".join(f"  {text if len(text) < 100 else f'{text[:96]} ...'}" for text in distinct)
        )
    command = next(iter(distinct.values()))
    check_set(command, where)
    assert command.program is not None
    if command.program.as_it_is:
        words = command.arguments
        named = bool(words) and not words[0].startswith("-")  # cli/preprocess_data.py NAME: configs/datasets/NAME.yaml
        file = [str(config_file(words[0], "", *DATASET_FOLDERS))] if named else []
        return [*command.program.as_it_is, *file, *words[len(file) :]]
    return foreign_of(command, where)


def needless_reason(commands: Sequence[Sequence[str]]) -> str:
    """Return why a program of the commands is not needed here; "" if there is none."""
    names = (Path(word).name for words in commands for word in words)
    return next((f"{name}: {NEEDLESS[name]}" for name in names if name in NEEDLESS), "")


def pipeline_of(commands: Sequence[Command], where: str) -> Foreign | None:
    """Return generation, scoring and training by OpenRLHF's programs, in a loop or once, as one of our pipelines."""
    names = [Path(command.name).name for command in commands]
    if not commands or set(names) - {"batch_inference.py", "train_sft.py", "train_dpo.py"}:
        return None
    for command in commands:
        check_set(command, where)
    found = pipeline_uses([list(uses_of_words(command.arguments)) for command in commands])
    if found is None:
        return None
    verb, uses = found
    of_2024 = all(OPENRLHF_2024 in command.program.libraries for command in commands if command.program)
    library = OPENRLHF_2024 if of_2024 else OPENRLHF
    rounds = [Use("", "--", "iterations", str(command.rounds)) for command in commands[:1] if command.rounds]
    return Foreign(name=where, uses=[*uses, *rounds], libraries=(library,), verbs=(verb,))


def pipeline_uses(commands: Sequence[Sequence[Use]]) -> tuple[str, list[Use]] | None:
    """Return the pipeline that generates (unless the data has completions), scores and trains, and its options."""
    stages: dict[str, list[Use]] = {}
    for uses in commands:
        task = next((str(use.value) for use in uses if use.name == "eval_task"), "train")
        stages[{"rm": "score", "train": "train"}.get(task, "generate")] = list(uses)
    if len(stages) != len(commands) or not {"score", "train"} <= set(stages):
        return None
    scoring = {use.name: str(use.value) for use in stages["score"]}
    verb = SELECTED.get(scoring.get("post_processor", ""))
    if verb is None or (verb == "conditional-sft") == ("generate" in stages):
        return None
    if verb == "conditional-sft" and "normalize_reward" not in scoring:
        raise UsageError(
            "the rewards are not normalized there (--normalize_reward is not given), and posttrain conditional-sft "
            "always normalizes them. Add it, or import the commands one by one, in quotes"
        )
    between = {"dataset", "dataset_probs"}  # what the trainer reads is what was selected
    own_policy = {"pretrain"} if "generate" in stages else set()
    found = [use for use in stages["train"] if use.name not in between | own_policy]
    for stage in ("generate", "score"):
        skipped = between if stage == "score" and "generate" in stages else set()
        found += [use._replace(name=f"{stage}.{use.name}") for use in stages.get(stage, []) if use.name not in skipped]
    if verb == "conditional-sft":
        found.append(Use("", "--", "generate.best_of_n", "0"))  # the completions of the data are scored
    return verb, found


def check_set(command: Command, where: str) -> None:
    """Raise UsageError if a word has a variable or a command whose value is not known."""
    if unset := re.search(r"\$\(|`|\$\{?[\w@*]+", " ".join(map(shlex.join, [command.arguments]))):
        raise UsageError(
            f"{where}: {unset[0]} is not set by a plain assignment in it. Replace it by its value; nothing is executed."
        )


def foreign_of(command: Command, where: str) -> Foreign:
    known = command.program
    assert known is not None
    uses: list[Use] = []
    arguments, directory = command.arguments, "."
    if known.config == "first" and arguments and not arguments[0].startswith("-") and "=" not in arguments[0]:
        uses += uses_of_config(Path(arguments[0]))
        arguments, directory = arguments[1:], str(Path(arguments[0]).parent)
    typed = list(uses_of_words(arguments))
    if known.config and known.config != "first":
        named = {use.name: str(use.value) for use in typed}
        if name := named.get(known.config):
            file = config_file(name, named.get("config_dir") or named.get("config_path") or "")
            uses += uses_of_config(file)
            directory = str(file.parent)
            typed = [use for use in typed if use.name not in (known.config, "config_dir", "config_path")]
    uses = without_section(uses, known.section) if known.section else uses
    notes = [f"{shlex.join(command.launcher)}: not needed: {LAUNCHED}"] if command.launcher else []
    uses += typed
    devices = command.devices()
    if not devices and known.libraries == (TRL,):
        devices = round(number(next((use.value for use in uses if use.name == "num_processes"), 0)) or 0)
    return Foreign(
        name=command.name if where == "the command" else where,
        uses=uses,
        libraries=known.libraries,
        verbs=known.verbs,
        devices=devices,
        directory=directory,
        notes=notes,
    )


def config_file(name: str, directory: str, *more: str) -> Path:
    """Return the file that hydra's --config-name and --config-dir name."""
    names = [name] if name.endswith(CONFIG_FILES) else [f"{name}.yaml", f"{name}.yml"]
    folders = [directory] if directory else [".", "configs", *more]
    places = [Path(folder) / entry for folder in folders for entry in names]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(f"{places[0]}: no such configuration file")
    return found


def uses_of_config(file: Path) -> list[Use]:
    """Return the entries of a YAML or JSON file; files of hydra with the entries below their names."""
    if not file.is_file():
        raise UsageError(f"{file}: no such configuration file")
    try:
        compose_yaml(file)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(yaml_problem(file, error)) from None
    found = list(uses_of_file(file, ("datasets",)))
    if not found:
        raise UsageError(f"{file}: cannot be read as YAML or JSON with `key: value` entries")
    return found
