"""A pipeline is a list of stages. Each makes files from files, is sealed when it is done, and is then passed over.

Beside what a stage made lies its seal, `<out>.done.json`: with which settings, from what, the size and sha256 of every
file it made, and its figures. Killed anywhere, the same list goes on at the first stage without a seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from posttrain.checkpoints.checkpoint import describe_files, is_run_directory, verify_files
from posttrain.config.renames import renamed_settings
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import atomic_write_json, file_sha256, read_json
from posttrain.models.paths import resolve_path
from posttrain.train.run import fingerprint
from posttrain.train.run_directory import RunDirectory, find_run

Figures = dict[str, float]
REPORT = "report.json"  # in the folder of a command that is done


class Stage:
    """One step. Write your own as a subclass: what it makes, what it reads, and how."""

    out: Path  # the file or folder that it makes; where it lies in the pipeline's folder is its name

    def reads(self) -> list[str]:
        """Files, and models by path: what other stages made, or anybody. With other content it is another stage."""
        return []

    def settings(self) -> dict[str, Any]:
        """All else that decides what it makes, as JSON can hold it."""
        return {}

    def run(self, quiet: bool) -> Figures:
        """Make it; the figures are kept in the seal. After a kill it is called again: go on, or begin anew."""
        raise NotImplementedError

    def made(self) -> list[Path]:
        """The files that are sealed."""
        return [self.out]

    def words(self, figures: Figures) -> str:
        """The figures in a line."""
        return ", ".join(f"{name} {value:.6g}" for name, value in figures.items())

    def tidy(self) -> None:
        """Once it is sealed: let go of what was only needed on the way."""


def run_stages(
    out: str | Path, stages: Sequence[Stage], *, quiet: bool = False, say: Callable[[str], None] = print
) -> list[Figures]:
    """Run what is not done yet, in order; the figures of all stages."""
    with RunDirectory.open(str(out), "pipeline", resume=is_run_directory(Path(out))) as folder:
        return run_in(folder.path, stages, quiet=quiet, say=say)


def run_in(
    folder: Path, stages: Sequence[Stage], *, quiet: bool = False, say: Callable[[str], None] = print
) -> list[Figures]:
    """The same in a folder that is ours already."""
    check_names(folder, stages)
    seals: dict[str, dict[str, Any]] = {}  # by what was made
    figures: list[Figures] = []
    for number, stage in enumerate(stages, 1):
        place = f"[{number}/{len(stages)}] {name_of(stage, folder)}"
        now = {"settings": portable(stage.settings(), folder), "read": contents(stage, seals, folder)}
        found = seal_of(stage)
        if found.is_file():
            seal = read_json(found)
            refuse_other(seal, now, found)
            say(f"{place}: done before; {stage.words(seal['figures'])}")
        else:
            for file in stage.reads():
                if file in seals:
                    verify_files(Path(file).parent, seals[file]["made"])
            say(f"{place}: {type(stage).__name__.lower()}")
            stage.out.parent.mkdir(parents=True, exist_ok=True)
            done = stage.run(quiet)
            seal = now | {"made": describe_files(stage.out.parent, stage.made()), "figures": done}
            atomic_write_json(found, seal)
            say(f"{place}: {stage.words(done)}")
        stage.tidy()
        seals[str(stage.out)] = seal
        figures.append(seal["figures"])
    return figures


# The folder


def open_folder(verb: str, out: str, settings: dict[str, Any], free: tuple[str, ...] = ()) -> RunDirectory:
    """The folder that is named; else the last one, if this command was begun there and not finished; else a new one.

    Settings whose names begin with one of `free` may differ from what the folder was begun with.
    """
    if not out:
        with contextlib.suppress(UsageError):  # there is none yet
            last = find_run("", verb)
            if not (last / REPORT).exists() and not changes(last, settings, free):
                out = str(last)
    there = bool(out) and is_run_directory(Path(out))
    if there and (other := stored_settings(Path(out)).get("verb")) != verb:
        raise UsageError(f"{out}: holds a run of `posttrain {other}`. Name another --output_dir.")
    folder = RunDirectory.open(out, verb, resume=there)
    if there and any(folder.path.rglob("*.done.json")) and (changed := changes(folder.path, settings, free)):
        folder.close()
        raise UsageError(
            f"{folder.path}: was begun with other settings: {'; '.join(changed)}. Use these, or another --output_dir."
        )
    folder.write_config(yaml.safe_dump({"verb": verb} | settings, sort_keys=False, allow_unicode=True))
    return folder


def changes(folder: Path, settings: dict[str, Any], free: tuple[str, ...]) -> list[str]:
    """In words, what differs from the configuration in a folder and matters."""
    now = flat(json.loads(json.dumps(settings)))
    before = flat(renamed_settings(stored_settings(folder), now))
    return differences(before, {name: value for name, value in now.items() if not (free and name.startswith(free))})


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In words. A setting that is not there is one that another version did not have: as good as an empty one."""
    return [
        f"{name} was {before.get(name)!r}, is {value!r}"
        for name, value in now.items()
        if before.get(name) != value and (before.get(name) or value)
    ]


def stored_settings(folder: Path) -> dict[str, Any]:
    try:
        return dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, yaml.YAMLError, TypeError, ValueError) as error:
        raise UsageError(f"{folder}/config.yaml: cannot be read: {error}") from error


# Seals


def seal_of(stage: Stage) -> Path:
    return stage.out.with_name(f"{stage.out.name}.done.json")


def name_of(stage: Stage, folder: Path) -> str:
    return str(stage.out.relative_to(folder).with_suffix(""))


def check_names(folder: Path, stages: Iterable[Stage]) -> None:
    """Every stage makes something else, in the pipeline's folder."""
    taken: set[Path] = set()
    for stage in stages:
        if not stage.out.is_relative_to(folder) or stage.out == folder:
            raise UsageError(f"{stage.out}: a stage makes what lies in the pipeline's folder, {folder}")
        if stage.out in taken:
            raise UsageError(f"{stage.out}: two stages make it")
        taken.add(stage.out)


def contents(stage: Stage, seals: dict[str, dict[str, Any]], folder: Path) -> dict[str, str]:
    """What a stage reads -> what tells it from anything else under that name."""
    return {portable(name, folder): content_of(name, seals) for name in stage.reads()}


def content_of(name: str, seals: dict[str, dict[str, Any]]) -> str:
    if name in seals:
        return hashlib.sha256(json.dumps(seals[name]["made"], sort_keys=True).encode()).hexdigest()
    path = Path(name)
    if path.is_file():
        return file_sha256(path)
    return fingerprint(resolve_path(name)) if path.is_dir() else name


def portable(value: Any, folder: Path) -> Any:
    """Places in the folder relative to it: it may be moved."""
    if isinstance(value, dict):
        return {key: portable(entry, folder) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry, folder) for entry in value]
    if isinstance(value, str | Path):
        return str(value).removeprefix(f"{folder}/")
    return value


def refuse_other(seal: dict[str, Any], now: dict[str, Any], file: Path) -> None:
    """A stage that is done stays as it is; nothing is silently built on something else."""
    if not {"settings", "read", "made", "figures"} <= seal.keys():
        raise CheckpointError(f"{file}: not a seal of a stage. Remove it to run the stage again.")
    wanted = flat(now["settings"])
    before = flat(renamed_settings(seal["settings"], wanted))
    changed = differences(before, {name: wanted.get(name) for name in dict.fromkeys([*before, *wanted])})
    changed += [f"{name} has changed" for name, value in now["read"].items() if seal["read"].get(name) != value]
    if changed:
        raise UsageError(
            f"{file}: this stage was done with other settings: {'; '.join(changed)}. Use these again, or name another "
            "--output_dir; or remove what this stage and all later ones made, and their *.done.json, to run them again."
        )


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
