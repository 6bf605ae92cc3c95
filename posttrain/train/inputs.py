"""What Python code gives a run besides its configuration: examples and a model in memory, callbacks, metrics.

Examples and model are written into the run directory before anything reads them. So a run from memory is resumed,
divided among workers and recorded exactly as one from files, and the caller's objects stay as they are.

    <run>/data/train.jsonl    <run>/data/eval.jsonl    <run>/initial_model/
"""

from __future__ import annotations

import copy
import filecmp
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.checkpoints import checkpoint
from posttrain.config.sections import Config
from posttrain.core.errors import CheckpointError, DataError, UsageError
from posttrain.core.files import atomic_write
from posttrain.data.reading.arrow_files import without_null_fields
from posttrain.models.saving import save_model
from posttrain.train.callbacks import Callback, MetricFunctions
from posttrain.train.run_directory import RunDirectory

IN_MEMORY = "in-memory:"  # begins the place of something that Run.open writes to a file

Rows = Iterable[Mapping[str, Any]]


@dataclass(slots=True, frozen=True, kw_only=True)
class RunInputs:
    """Objects of the calling process; the configuration names them in-memory:NAME until the run is opened."""

    examples: Mapping[str, Rows] = field(default_factory=dict)  # by name: train, eval, or with a number
    model: Any = None  # a transformers model
    tokenizer: Any = None
    callbacks: tuple[Callback, ...] = ()
    metrics: MetricFunctions = field(default_factory=dict)
    from_python: bool = False  # messages then name the Python call that resumes the run

    @property
    def has_objects(self) -> bool:
        """Whether something must be written into the run directory."""
        return bool(self.examples) or self.model is not None or self.tokenizer is not None

    def write(self, config: Config, folder: RunDirectory) -> Config:
        """Write examples and model into the run directory; return the configuration that names these files."""
        if self.model is not None or self.tokenizer is not None:
            option, place = self.write_model(folder)
            model = replace(config.model, path=place) if option == "path" else replace(config.model, tokenizer=place)
            config = replace(config, model=model)
        files = {f"{IN_MEMORY}{name}": self.write_examples(name, folder) for name in self.examples}
        train, evaluation = (
            tuple(files.get(name, name) for name in names) for names in (config.data.train, config.data.eval)
        )
        return replace(config, data=replace(config.data, train=train, eval=evaluation))

    def write_model(self, folder: RunDirectory) -> tuple[str, str]:
        """Write model and tokenizer, or the tokenizer alone; return the option that names them and the place."""
        option = "tokenizer" if self.model is None else "path"
        place = folder.path.absolute() / ("tokenizer" if self.model is None else "initial_model")
        new = place.with_name(f".new-{place.name}")
        shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
        try:
            new.mkdir()
            tokenizer = copy.deepcopy(self.tokenizer)  # saving may set its padding token
            if self.model is None:
                tokenizer.save_pretrained(new)
            else:
                save_model(self.model, tokenizer, new)
            if has_checkpoint(folder) and place.is_dir():
                names = [file.name for file in new.iterdir()]
                if filecmp.cmpfiles(place, new, names, shallow=False)[0] != names:
                    raise changed_error(folder, "model")
            else:
                shutil.rmtree(place, ignore_errors=True)
                new.rename(place)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return option, str(place)

    def write_examples(self, name: str, folder: RunDirectory) -> str:
        """Write the examples; a run that is resumed must have been started with the same ones."""
        file = folder.path.absolute() / "data" / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        new = file.with_suffix(".new")
        try:
            atomic_write(new, as_json_lines(self.examples[name]))
            if file.is_file() and has_checkpoint(folder) and not filecmp.cmp(file, new, shallow=False):
                raise changed_error(folder, "evaluation data" if name.startswith("eval") else "data")
            new.replace(file)
        finally:
            new.unlink(missing_ok=True)
        return str(file)


NO_INPUTS = RunInputs()


def has_checkpoint(folder: RunDirectory) -> bool:
    return checkpoint.newest_valid(folder.checkpoints) is not None


def changed_error(folder: RunDirectory, what: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.path}: the {what} changed since this run was started, so it cannot be resumed. "
        f"Give the {what} it was started with, or start a new run with another output_dir."
    )


def as_json_lines(rows: Rows) -> Iterator[str]:
    """Yield examples as lines of JSON; numpy values and dates become plain ones."""
    is_table = hasattr(rows, "features")  # datasets.Dataset
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UsageError(f"data: example {number} is a {type(row).__name__}; it must be a dict")
        try:
            values = without_null_fields(dict(row)) if is_table else dict(row)
            yield json.dumps(values, ensure_ascii=False, default=plain_value) + "\n"
        except (TypeError, ValueError) as error:
            raise DataError(f"data: example {number} cannot be written as JSON: {error}") from error


def plain_value(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"it has a value of type {type(value).__name__}")
