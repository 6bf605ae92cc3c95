"""Runs a pipeline, a list of stages. Each stage writes files from other files and is skipped once it is finished.

A finished stage has a seal next to its output, `<out>.done.json`: its settings and inputs, size and sha256 of every
file that it wrote, and its figures. After a kill, the same list of stages continues at the first one without a seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from posttrain.checkpoints.checkpoint import describe_files, is_run_directory, verify_files
from posttrain.config.compare import changed_options, flat
from posttrain.config.renames import renamed_settings
from posttrain.core.errors import CheckpointError, UsageError
from posttrain.core.files import atomic_write_json, file_sha256, read_json
from posttrain.models.paths import model_fingerprint, resolve_path
from posttrain.train.run_directory import RunDirectory, find_run

Figures = dict[str, float]
REPORT = "report.json"  # in the run directory of a finished pipeline


class Stage:
    """One stage of a pipeline. A subclass defines its output, its inputs and how it computes one from the other."""

    out: Path  # the file or directory that it writes; its place in the run directory is the name of the stage

    def reads(self) -> list[str]:
        """Return the files and the paths of models that it reads; with other content it is another stage."""
        return []

    def settings(self) -> dict[str, Any]:
        """Return all other settings that determine its output, as JSON values."""
        return {}

    def defaults(self) -> dict[str, Any]:
        """Return section.option -> default. A seal that an earlier version wrote lacks newer options."""
        return {}

    def run(self, quiet: bool) -> Figures:
        """Write the output and return figures for the seal; after a kill it is called again."""
        raise NotImplementedError

    def written_files(self) -> list[Path]:
        """Return the files that the seal describes."""
        return [self.out]

    def summary(self, figures: Figures) -> str:
        """Return the figures as one line of text."""
        return ", ".join(f"{name} {value:.6g}" for name, value in figures.items())

    def remove_temporary_files(self) -> None:
        """Delete intermediate files; called when the seal is written."""


def run_stages(
    out: str | Path, stages: Sequence[Stage], *, quiet: bool = False, report: Callable[[str], None] = print
) -> list[Figures]:
    """Run the stages that are not finished, in order, and return the figures of all stages."""
    with RunDirectory.open(str(out), "pipeline", resume=is_run_directory(Path(out))) as folder:
        return run_in(folder.path, stages, quiet=quiet, report=report)


def run_in(
    folder: Path, stages: Sequence[Stage], *, quiet: bool = False, report: Callable[[str], None] = print
) -> list[Figures]:
    """Do the same in a run directory that is open already."""
    check_names(folder, stages)
    seals: dict[str, dict[str, Any]] = {}  # by the output of their stage
    figures: list[Figures] = []
    for number, stage in enumerate(stages, 1):
        place = f"[{number}/{len(stages)}] {name_of(stage, folder)}"
        now = {"settings": portable(stage.settings(), folder), "read": contents(stage, seals, folder)}
        found = seal_of(stage)
        if found.is_file():
            seal = read_json(found)
            refuse_other(seal, now, stage.defaults(), found)
            report(f"{place}: done before; {stage.summary(seal['figures'])}")
        else:
            for file in stage.reads():
                if file in seals:
                    verify_files(Path(file).parent, seals[file]["made"])
            report(f"{place}: {type(stage).__name__.lower()}")
            stage.out.parent.mkdir(parents=True, exist_ok=True)
            done = stage.run(quiet)
            seal = now | {"made": describe_files(stage.out.parent, stage.written_files()), "figures": done}
            atomic_write_json(found, seal)
            report(f"{place}: {stage.summary(done)}")
        stage.remove_temporary_files()
        seals[str(stage.out)] = seal
        figures.append(seal["figures"])
    return figures


# The folder


def open_folder(
    verb: str,
    out: str,
    settings: dict[str, Any],
    free: tuple[str, ...] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> RunDirectory:
    """Open the run directory `out`; if empty, the newest one if this command is unfinished there, else a new one.

    Settings whose names begin with one of `free` may differ from those that the directory was created with; options
    that were added since then must have their `defaults`.
    """
    if not out:
        with contextlib.suppress(UsageError):  # there is none yet
            last = find_run("", verb)
            if not (last / REPORT).exists() and not changes(last, settings, free, defaults):
                out = str(last)
    there = bool(out) and is_run_directory(Path(out))
    if there and (other := stored_settings(Path(out)).get("verb")) != verb:
        raise UsageError(f"{out}: holds a run of `posttrain {other}`. Name another --output_dir.")
    folder = RunDirectory.open(out, verb, resume=there)
    if there and any(folder.path.rglob("*.done.json")) and (changed := changes(folder.path, settings, free, defaults)):
        folder.close()
        raise UsageError(
            f"{folder.path}: was started with other settings: {'; '.join(changed)}. Use those, or another --output_dir."
        )
    folder.write_config(yaml.safe_dump({"verb": verb} | settings, sort_keys=False, allow_unicode=True))
    return folder


def changes(folder: Path, settings: dict[str, Any], free: tuple[str, ...], defaults: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the settings that differ from the configuration saved in a run directory."""
    now = flat(json.loads(json.dumps(settings)))
    before = flat(renamed_settings(stored_settings(folder), now))
    compared = {name: value for name, value in now.items() if not (free and name.startswith(free))}
    return list(changed_options(before, compared, defaults).values())


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
    """Raise UsageError unless every stage has an output of its own inside the run directory."""
    taken: set[Path] = set()
    for stage in stages:
        if not stage.out.is_relative_to(folder) or stage.out == folder:
            raise UsageError(f"{stage.out}: the output of a stage must be inside the run directory {folder}")
        if stage.out in taken:
            raise UsageError(f"{stage.out}: it is the output of two stages")
        taken.add(stage.out)


def contents(stage: Stage, seals: dict[str, dict[str, Any]], folder: Path) -> dict[str, str]:
    """Return input of a stage -> hash of its content."""
    return {portable(name, folder): digest_of_input(name, seals) for name in stage.reads()}


def digest_of_input(name: str, seals: dict[str, dict[str, Any]]) -> str:
    if name in seals:
        return hashlib.sha256(json.dumps(seals[name]["made"], sort_keys=True).encode()).hexdigest()
    path = Path(name)
    if path.is_file():
        return file_sha256(path)
    return model_fingerprint(resolve_path(name)) if path.is_dir() else name


def portable(value: Any, folder: Path) -> Any:
    """Make paths inside the run directory relative to it, so that it can be moved."""
    if isinstance(value, dict):
        return {key: portable(entry, folder) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [portable(entry, folder) for entry in value]
    if isinstance(value, str | Path):
        return str(value).removeprefix(f"{folder}/")
    return value


def refuse_other(seal: dict[str, Any], now: dict[str, Any], defaults: dict[str, Any], file: Path) -> None:
    """Raise UsageError if a finished stage was run with other settings or inputs."""
    if not {"settings", "read", "made", "figures"} <= seal.keys():
        raise CheckpointError(f"{file}: not a seal of a stage. Remove it to run the stage again.")
    wanted = flat(now["settings"])
    before = flat(renamed_settings(seal["settings"], wanted))
    compared = {name: wanted.get(name) for name in dict.fromkeys([*before, *wanted])}
    changed = list(changed_options(before, compared, defaults).values())
    changed += [f"{name} has changed" for name, value in now["read"].items() if seal["read"].get(name) != value]
    if changed:
        raise UsageError(
            f"{file}: this stage was run with other settings: {'; '.join(changed)}. Use those again, or choose another "
            "--output_dir; or remove what this stage and all later ones made, and their *.done.json, to run them again."
        )
