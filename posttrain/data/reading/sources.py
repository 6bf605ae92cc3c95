"""Resolve the name of a data source: a file, a folder, a pattern, one split of a folder, or a dataset of a hub.

    train.jsonl   folder    folder:test    'shards/*.parquet'
    owner/name    owner/name:test    owner/name@part:test    modelscope://owner/name

A local file or folder of that name takes precedence over a hub. Every record has its position (`file:line`), and every
error about a file names it.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.core.errors import UsageError
from posttrain.data.reading.arrow_files import without_null_fields
from posttrain.data.reading.readers import READERS, extension, read_file
from posttrain.data.reading.records import BadRecord, ReadProgress, Record, Records

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
SPLIT = re.compile(r"(.+):([A-Za-z_][\w.-]*)", re.ASCII | re.DOTALL)
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<part>[\w./-]+))?(?::(?P<split>\w[\w.-]*))?", re.ASCII)
MODELSCOPE = "modelscope://"
OTHER_DATA = (
    *(".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz", ".tsv", ".ndjson", ".jsonlines"),
    *(".xlsx", ".feather", ".orc", ".avro", ".pkl", ".npy"),
)
"""Extensions of data that is not read; a folder with such a file is refused, because it would be left out."""
DECOMPRESS = {".zst": "zstd -d", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip", ".tar": "tar xf", ".tgz": "tar xf"}
ABOUT_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files about the data that `datasets` and LLaMA-Factory write beside it."""


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A file, or a dataset of a hub, that is read from start to end."""

    name: str
    scan: Callable[[ReadProgress | None], Records]
    size: int = 0  # bytes of the file


def read_records(name: str | Path, meter: ReadProgress | None = None) -> Iterator[Record]:
    """Read all records of a source; DataError at the first that cannot be read."""
    for record in scan_records(name, meter):
        if isinstance(record, BadRecord):
            raise record.error
        yield record


def scan_records(name: str | Path, meter: ReadProgress | None = None) -> Records:
    """Read all records of a source, bad ones included."""
    for part in source_parts(name):
        yield from part.scan(meter)


def source_parts(name: str | Path) -> list[SourcePart]:
    """Return the parts of a source in reading order, downloading if necessary; UsageError if there are none."""
    text = str(name)
    if text.startswith(MODELSCOPE):
        return [_modelscope(text)]
    if _is_hub_name(text):
        return [_hub(text)]
    return [SourcePart(str(file), partial(_scan_file, file), file.stat().st_size) for file in find_files(name)]


def _scan_file(file: Path, meter: ReadProgress | None) -> Records:
    return read_file(file, meter)


# Files


def find_files(name: str | Path) -> list[Path]:
    """Return the files of a source, sorted by name; UsageError if there are none."""
    place, split = Path(name), ""
    found = SPLIT.fullmatch(str(name))
    if not place.exists() and found and Path(found.group(1)).exists():
        place, split = Path(found.group(1)), found.group(2)
        if place.is_file():
            raise UsageError(f"{name}: a file has no splits; only a folder or a dataset of a hub has")
    if place.is_dir():
        files = _files_of_folder(place, split)
    elif place.is_file():
        files = [place]
    elif any(letter in str(name) for letter in "*?["):
        try:
            pattern = str(place.relative_to(place.anchor))
            files = sorted(file for file in Path(place.anchor).glob(pattern) if file.is_file())
        except ValueError as error:
            raise UsageError(f"{name}: not a valid file pattern: {error}") from error
        if not files:
            raise UsageError(f"{name}: no file matches")
    else:
        raise UsageError(f"{name}: no such file or folder")
    for file in files:
        if extension(file) not in READERS:
            raise _unknown_type(file)
    kinds = sorted({extension(file) for file in files})
    if len(kinds) > 1:
        raise UsageError(
            f"{name}: has files of several types ({', '.join(kinds)}); choose one with a pattern such as *{kinds[0]}"
        )
    return files


def _files_of_folder(folder: Path, split: str) -> list[Path]:
    visible = (file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
    named = [file for file in visible if file.is_file() and file.name not in ABOUT_DATA]
    listed = {parent: _saved_files(parent) for parent in {file.parent for file in named}}
    data = [file for file in named if (saved := listed[file.parent]) is None or file.name in saved]
    files = sorted(file for file in data if extension(file) in READERS)
    for file in data:
        if file.suffix.lower() in OTHER_DATA and (not split or _split_of(file, folder, split) == split):
            pattern = f"; to read the others, name them: '{folder}/*{extension(files[0])}'" if files else ""
            raise UsageError(f"{_unknown_type(file)}{pattern}")
    if not files:
        raise UsageError(f"{folder}: the folder has no data files; supported are {known_extensions()}")
    splits = sorted({_split_of(file, folder) for file in files} - {""})
    if split:
        chosen = [file for file in files if _split_of(file, folder, split) == split]
        if not chosen:
            there = f"; its splits are {', '.join(splits)}" if splits else ""
            raise UsageError(f"{folder}:{split}: the folder has no file named {split} or {split}-...{there}")
        return chosen
    if set(splits) - {"train"} and len({_split_of(file, folder) for file in files}) > 1:
        raise UsageError(
            f"{folder}: has files of several splits ({', '.join(splits)}); choose one, for example {folder}:train"
        )
    return files


def _split_of(file: Path, folder: Path, *more: str) -> str:
    """Return the split that the name of a file or of its folders begins with: train-00000-of-00002.parquet."""
    words = [re.split(r"[^A-Za-z]", part, maxsplit=1)[0] for part in reversed(file.relative_to(folder).parts)]
    whole = [part.split(".")[0] for part in reversed(file.relative_to(folder).parts)]
    return next((word for word in (*whole, *words) if word in (*SPLITS, *more)), "")


def _saved_files(folder: Path) -> list[str] | None:
    """Return the files of a dataset that `datasets` saved in a folder, which also caches others there; None if none."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        return [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _unknown_type(file: Path) -> UsageError:
    command = DECOMPRESS.get(file.suffix.lower(), "")
    remedy = f"; decompress it first: {command} {file.name}" if command else ""
    return UsageError(f"{file}: unknown file type; supported are {known_extensions()}{remedy}")


def known_extensions() -> str:
    """Return the supported file extensions, for messages."""
    return ", ".join(READERS) + " (each also with .gz)"


# Hubs


def _is_hub_name(text: str) -> bool:
    """Whether a name looks like owner/name, does not exist locally, and has no file extension."""
    found = HUB_NAME.fullmatch(text)
    if not found or Path(text).exists() or Path(found["name"]).exists():
        return False
    return extension(Path(found["name"])) not in READERS


def _hub(text: str) -> SourcePart:
    found = HUB_NAME.fullmatch(text)
    assert found is not None
    not_found = f"{text}: no such file or folder"
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"{not_found}; to read a dataset of the hub: pip install datasets") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    offline = datasets.config.HF_HUB_OFFLINE or not _is_reachable(datasets.config.HF_ENDPOINT)
    name, part, split = found["name"], found["part"], found["split"]
    if offline:  # avoids a long timeout per file; downloaded datasets are still found
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        if part is None:
            loaded = datasets.load_dataset(name)
        elif part in datasets.get_dataset_config_names(name):
            loaded = datasets.load_dataset(name, part)
        else:
            loaded = datasets.load_dataset(name, data_dir=part)
    except Exception as error:  # network, hub and dataset code can raise anything
        reason = (
            "the hub is unreachable and the dataset is not in its cache"
            if offline
            else f"from the hub: {_reason(error)}"
        )
        raise UsageError(f"{not_found}, and {reason}") from error
    return SourcePart(text, partial(_scan_table, text, _one_split(text, loaded, split)))


def _is_reachable(address: str) -> bool:
    """Whether a server accepts connections at an address."""
    if urllib.request.getproxies():  # a proxy accepts connections for every server
        return True
    place = urlsplit(address)
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def _modelscope(text: str) -> SourcePart:
    found = HUB_NAME.fullmatch(text.removeprefix(MODELSCOPE))
    if found is None:
        raise UsageError(f"{text}: expected {MODELSCOPE}owner/name, optionally with @part and :split")
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise UsageError(f"{text}: needs the package modelscope: pip install 'modelscope[datasets]'") from error
    options = {"subset_name": found["part"]} if found["part"] else {}
    try:
        loaded = MsDataset.load(found["name"], split=found["split"] or "train", **options)
        table = loaded.to_hf_dataset() if isinstance(loaded, MsDataset) else loaded
    except Exception as error:  # as in _hub
        raise UsageError(f"{text}: from ModelScope: {_reason(error)}") from error
    return SourcePart(text, partial(_scan_table, text, table))


@cache
def modelscope_model(text: str) -> str:
    """Return the folder of a model of ModelScope (`modelscope://owner/name`), downloading it if necessary."""
    name = text.removeprefix(MODELSCOPE)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        raise UsageError(f"model.path: {text}: expected {MODELSCOPE}owner/name")
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise UsageError(f"model.path: {text}: needs the package modelscope: pip install modelscope") from error
    try:
        return str(snapshot_download(name))
    except Exception as error:  # as in _hub
        raise UsageError(f"model.path: {text}: from ModelScope: {_reason(error)}") from error


def _one_split(text: str, loaded: Any, split: str | None) -> Any:
    """Return the requested split, or train, or the only one."""
    there = list(loaded)
    wanted = split or ("train" if "train" in there or len(there) != 1 else there[0])
    if wanted not in there:
        plain = text.removesuffix(f":{split}")
        raise UsageError(f"{text}: the dataset has no split {wanted}; choose one of {plain}:{{{','.join(there)}}}")
    return loaded[wanted]


def _scan_table(text: str, table: Iterable[dict[str, Any]], _: ReadProgress | None) -> Records:
    number = 0
    for number, values in enumerate(table, start=1):
        yield Record(without_null_fields(dict(values)), f"{text}:row {number}")
    if not number:
        raise UsageError(f"{text}: the dataset has no examples")


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
