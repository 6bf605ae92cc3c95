"""The launch form: the options of a trainer, the command and YAML that chosen values mean, checks, and the start.

Options, their types, defaults and sentences are read from the dataclasses of the configuration, as help is. Checks and
runs are the same commands that a user types, in processes of their own: nothing of a model or of data is loaded here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from posttrain.algorithms import ALGORITHMS
from posttrain.board.control import StartedRun, start
from posttrain.board.runs import BoardRun
from posttrain.config.checks import check
from posttrain.config.help import SECTIONS, is_common, negative, options_of
from posttrain.config.parsing import (
    Entry,
    about,
    entries_of_file,
    entries_of_words,
    option_keys,
    read_entries,
    resolve,
    sections,
    verb_of_file,
)
from posttrain.config.renames import renamed_settings
from posttrain.config.sections import Config, as_mapping, option_value, with_algorithm
from posttrain.core.errors import UsageError
from posttrain.endpoint.errors import ApiError

NOT_IN_THE_FORM = {"resume", "allow_changed_data", "quiet"}
MAX_OPTIONS = 400  # of one request
MAX_LETTERS = 20_000  # of one value
REPORT_BYTES = 64 * 2**20  # of a data check, which has the first examples as they are
MAX_JOBS = 200  # started by this board; older ones that have ended are forgotten
PRESETS = Path("configs")  # of the directory in which the board was started
CHECKS = ("data", "plan")


# What the form shows


def trainers() -> list[dict[str, Any]]:
    return [{"name": name, "help": kind.help, "online": kind.online} for name, kind in sorted(ALGORITHMS.items())]


def form(verb: str) -> list[dict[str, Any]]:
    """Return the options of a trainer in the order of help, with what a control for them needs."""
    defaults = defaults_of(verb)
    found = []
    for option in sorted(options_of(defaults), key=lambda option: SECTIONS.index(option.section)):
        if option.key in NOT_IN_THE_FORM:
            continue
        value = option_value(defaults, option.key)
        found.append(
            {
                "key": option.key,
                "section": option.title,
                "name": option.name,
                "type": option.words,
                "control": "switch" if isinstance(value, bool) else "list" if isinstance(value, tuple) else "text",
                "choices": list(option.choices),
                "default": value if isinstance(value, bool) else option.default.strip("`"),
                "help": option.sentence,
                "usual": is_common(option) and not option.rare,
            }
        )
    return found


def defaults_of(verb: str) -> Config:
    if verb not in ALGORITHMS:
        raise ApiError(404, "there is no such trainer")
    return with_algorithm(ALGORITHMS[verb])


def values_of_run(run: BoardRun) -> dict[str, Any]:
    """Return the trainer of a run and its options that are not defaults, as the form takes them."""
    changed = changed_values(run)
    return {"trainer": str(run.config_mapping()["verb"]), "values": {name: as_typed(v) for name, v in changed.items()}}


def changed_options(run: BoardRun) -> set[str]:
    """Return the names of the options of a run that are not defaults."""
    try:
        return set(changed_values(run))
    except ApiError:  # none of a trainer, or none of ours
        return set()


def changed_values(run: BoardRun) -> dict[str, Any]:
    """Return the options of a trainer's run that are not defaults, by their present names."""
    config = run.config_mapping()
    verb = str(config.get("verb", ""))
    if verb not in ALGORITHMS:
        raise ApiError(409, f"{run.name}: its configuration names no trainer")
    defaults = defaults_of(verb)
    plain = flattened(as_mapping(defaults))
    known = set(option_keys(defaults)) - NOT_IN_THE_FORM - {"output_dir"}
    try:
        saved = renamed_settings(config, plain)
    except (UsageError, OverflowError, OSError) as error:  # values that no version has written
        raise ApiError(409, f"{run.name}: its configuration cannot be read: {str(error)[:500]}") from None
    return {name: value for name, value in saved.items() if name in known and value != plain.get(name)}


def presets(verb: str) -> list[str]:
    """Return the names of the presets for a trainer in the directory `configs`."""
    found = []
    for file in sorted(PRESETS.glob("*.yaml"))[:500]:
        with contextlib.suppress(UsageError):  # it is none of ours
            if verb_of_file(file) == verb:
                found.append(file.name)
    return found


def values_of_preset(verb: str, name: str) -> dict[str, Any]:
    """Return the options that a preset sets; its name is one that `presets` returns."""
    if name not in presets(verb):
        raise ApiError(404, "there is no such preset")
    defaults = defaults_of(verb)
    entries = [found for entry in entries_of_file(PRESETS / name, defaults, verb) for found in resolve(entry, defaults)]
    return {"trainer": verb, "values": {entry.key: as_typed(entry.value) for entry in entries}}


def flattened(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return section.option -> value of a configuration; options that are mappings stay."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        flat |= {f"{name}.{inner}": each for inner, each in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def as_typed(value: Any) -> Any:
    """Return a value as a control of the form holds it: a switch, a list of texts, or a text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


# What the chosen values mean


@dataclass(slots=True)
class Launch:
    """A configuration that was chosen in the form, as a command and as YAML."""

    verb: str
    config: Config
    words: list[str]  # of the command, after `posttrain`
    yaml: str
    problem: str  # why it cannot run as it is; empty: it can

    @classmethod
    def read(cls, body: Mapping[str, Any], output_dir: str = "") -> Launch:
        """Read a request of the form; raises UsageError for a value that an option cannot have."""
        verb = str(body.get("trainer", ""))
        values = dict(checked_values(body.get("values")))
        if output_dir:
            values["output_dir"] = output_dir
        defaults, text = defaults_of(verb), about(verb, ALGORITHMS[verb])
        entries = [
            Entry("", "--", key, value if isinstance(value, bool | list) else [value]) for key, value in values.items()
        ]
        config = read_entries(verb, text, defaults, entries)
        keys = list(dict.fromkeys(found.key for entry in entries for found in resolve(entry, defaults)))
        words = [verb, *command_words(keys, config)]
        try:
            again = read_entries(verb, text, defaults, list(entries_of_words(words[1:], defaults, verb)))
        except UsageError:
            again = None
        if again != config:  # such as a text that begins with --
            key = next((key for key, value in values.items() if "--" in str(value)), "one of the values")
            raise UsageError(f"{key}: this value cannot be written on a command line; set it in a YAML file")
        problem = ""
        try:
            ALGORITHMS[verb](check(config).algo)
        except UsageError as error:
            problem = str(error)
        return cls(verb, config, words, as_preset(verb, keys, config), problem)

    @property
    def command(self) -> str:
        return shlex.join(["posttrain", *self.words])

    def data_check(self) -> list[str]:
        """Return the words of `posttrain data check` for the training data."""
        data, model = self.config.data, self.config.model
        if not data.train:
            raise UsageError("data.train is not set: name the files to check")
        words = ["data", "check", *data.train, "--trainer", self.verb, "--model", model.path or "pico", "--json"]
        words += ["--max_length", str(data.max_length), "--on_overlong", data.on_overlong]
        words += ["--tokenizer", model.tokenizer] if model.tokenizer else []
        words += ["--map_keys", json.dumps(data.map_keys)] if data.map_keys else []
        words += ["--chat_template", data.chat_template] if data.chat_template else []
        placeholder = getattr(self.config.algo, "placeholder", "")
        return [*words, "--placeholder", placeholder] if placeholder else words

    def plan(self) -> list[str]:
        return ["plan", *self.words]


def checked_values(values: Any) -> dict[str, Any]:
    """Return the values of a request; ApiError unless they are texts, lists of texts and switches by option."""
    if not isinstance(values, dict) or len(values) > MAX_OPTIONS:
        raise ApiError(400, f"values: expected an object with at most {MAX_OPTIONS} options", param="values")
    for key, value in values.items():
        texts = value if isinstance(value, list) else [value]
        if key in NOT_IN_THE_FORM or not all(isinstance(text, str | bool) for text in texts):
            raise ApiError(400, f"{key[:100]}: expected a text, a list of texts or a switch", param="values")
        if len(texts) > MAX_OPTIONS or any(len(str(text)) > MAX_LETTERS or "\0" in str(text) for text in texts):
            raise ApiError(400, f"{key[:100]}: the value is too long, or has a zero byte", param="values")
    return values


def command_words(keys: Sequence[str], config: Config) -> list[str]:
    """Return options as they are typed; --model, --data and --reward in their short form."""
    mains = {f"{name}.{section.main}": name for name, section in sections(config).items() if hasattr(section, "main")}
    words: list[str] = []
    for key in keys:
        value, name = option_value(config, key), mains.get(key, key)
        if isinstance(value, bool):
            words.append(f"--{name if value else negative(name)}")
        elif isinstance(value, dict):
            words += [f"--{name}", json.dumps(value, ensure_ascii=False)]
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def as_preset(verb: str, keys: Sequence[str], config: Config) -> str:
    """Return YAML with these options, as files in configs/ have them."""
    mapping = as_mapping(config)
    chosen: dict[str, Any] = {"verb": verb}
    for key in keys:
        section, dot, name = key.partition(".")
        if dot:
            chosen.setdefault(section, {})[name] = mapping[section][name]
        else:
            chosen[key] = mapping[key]
    return yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True)


# Checks and runs


@dataclass(slots=True)
class Job:
    """A command that the form has started."""

    id: str
    kind: str  # data, plan or run
    started: StartedRun
    output_dir: str = ""

    def describe(self) -> dict[str, Any]:
        found = self.started.describe() | {"job": self.id, "kind": self.kind, "output_dir": self.output_dir}
        if self.kind == "data" and found["exit_code"] is not None:
            found["report"] = last_object(self.started.end_of_output(REPORT_BYTES))
        return found


def last_object(output: str) -> Any:
    """Return the JSON object in the last line of an output that is one; None if there is none."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(line)
    return None


@dataclass(slots=True)
class Launcher:
    """Starts checks and runs. A check ends with the board, and when the next one of its kind begins; a run does not."""

    roots: Sequence[Path]
    jobs: dict[str, Job] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, kind: str, launch: Launch) -> Job:
        """Start a check of the data or the plan."""
        if kind not in CHECKS:
            raise ApiError(400, f"check: expected one of {', '.join(CHECKS)}", param="check")
        with self.lock:
            self.end_checks(kind)
            words = launch.data_check() if kind == "data" else launch.plan()
            return self.add(Job(secrets.token_hex(8), kind, start(words)))

    def launch(self, body: Mapping[str, Any]) -> Job:
        """Start a run in a new directory below those that the board shows."""
        with self.lock:
            wanted = str(dict(checked_values(body.get("values"))).get("output_dir", ""))
            folder = self.run_directory(wanted, str(body.get("trainer", "")))
            launch = Launch.read(body, str(folder))
            if launch.problem:
                raise UsageError(launch.problem)
            return self.add(Job(secrets.token_hex(8), "run", start(launch.words), str(folder)))

    def run_directory(self, wanted: str, verb: str) -> Path:
        """Return the directory of a new run: a name or path below one of the board's directories."""
        root = self.roots[0]
        if not wanted:
            used = {job.output_dir for job in self.jobs.values()}
            numbered = (root / f"{verb}-{number:03}" for number in range(1, 100_000))
            return next(path for path in numbered if not path.exists() and str(path) not in used)
        try:
            path = Path(wanted).expanduser()
            path = (path if path.is_absolute() or len(path.parts) > 1 else root / path).resolve()
            is_below = any(path != known and path.is_relative_to(known) for known in self.roots)
            is_used = is_below and path.exists() and any(path.iterdir() if path.is_dir() else [path])
        except (OSError, RuntimeError, UnicodeError) as error:  # too long, a directory of others, no such user
            raise UsageError(f"output_dir is {wanted[:200]}: {error}. Choose another name") from None
        if not is_below:
            names = ", ".join(map(str, self.roots))
            raise UsageError(f"output_dir is {wanted}: a run that the board starts must be below {names}. Give a name")
        if is_used:
            raise UsageError(f"output_dir is {wanted}: there is something already. Choose another name")
        return path

    def add(self, job: Job) -> Job:
        self.jobs[job.id] = job
        for old in [each for each in self.jobs.values() if each.started.process.poll() is not None][:-MAX_JOBS]:
            del self.jobs[old.id]
        return job

    def get(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise ApiError(404, "there is no such job, or not any more")
        return self.jobs[job_id]

    def end_checks(self, kind: str = "") -> None:
        """End the checks (of a kind) that still run."""
        for job in self.jobs.values():
            if job.kind in CHECKS and kind in ("", job.kind) and job.started.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.started.process.pid, signal.SIGKILL)  # it has a session of its own
                job.started.process.wait()
