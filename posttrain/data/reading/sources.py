"""Where rows come from: a file, a folder, a pattern, one split of a folder, or a data set of a hub.

    rows.jsonl    folder    folder:test    'shards/*.parquet'
    owner/name    owner/name:test    owner/name@part:test    modelscope://owner/name

What exists here under that name is taken before a hub is asked. Every row knows where it stands (`file:line`), and
whatever is wrong with a file is said with that place.
"""

from __future__ import annotations

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
from posttrain.data.reading.readers import READERS, BadRecord, ReadProgress, Record, Records, extension, read_file

__all__ = [
    "READERS",
    "BadRecord",
    "ReadProgress",
    "Record",
    "SourcePart",
    "find_files",
    "read_records",
    "scan_records",
    "source_parts",
]

SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
SPLIT = re.compile(r"(.+):([A-Za-z_][\w.-]*)", re.ASCII | re.DOTALL)
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<part>[\w./-]+))?(?::(?P<split>\w[\w.-]*))?", re.ASCII)
MODELSCOPE = "modelscope://"


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A file, or a data set of a hub: something that is read from its beginning to its end."""

    name: str
    scan: Callable[[ReadProgress | None], Records]
    size: int = 0  # bytes of the file


def read_records(name: str | Path) -> Iterator[Record]:
    """All rows that `name` stands for; DataError at the first that cannot be read."""
    for row in scan_records(name):
        if isinstance(row, BadRecord):
            raise row.error
        yield row


def scan_records(name: str | Path) -> Records:
    """All rows that `name` stands for, the bad ones too."""
    for part in source_parts(name):
        yield from part.scan(None)


def source_parts(name: str | Path) -> list[SourcePart]:
    """What `name` stands for, in the order of reading; UsageError if that is nothing. Downloads if need be."""
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
    """The files that `name` stands for, in the order of their names; UsageError if there is none."""
    place, split = Path(name), ""
    found = SPLIT.fullmatch(str(name))
    if not place.exists() and found and Path(found.group(1)).exists():
        place, split = Path(found.group(1)), found.group(2)
        if place.is_file():
            raise UsageError(f"{name}: a file has no splits; only a folder or a data set of a hub has")
    if place.is_dir():
        files = _files_of_folder(place, split)
    elif place.is_file():
        files = [place]
    elif any(letter in str(name) for letter in "*?["):
        try:
            pattern = str(place.relative_to(place.anchor))
            files = sorted(file for file in Path(place.anchor).glob(pattern) if file.is_file())
        except ValueError as error:
            raise UsageError(f"{name}: not a pattern for files: {error}") from error
        if not files:
            raise UsageError(f"{name}: no file matches")
    else:
        raise UsageError(f"{name}: no such file or folder")
    for file in files:
        if extension(file) not in READERS:
            raise UsageError(f"{file}: unknown kind of file; known are {known_extensions()}")
    kinds = sorted({extension(file) for file in files})
    if len(kinds) > 1:
        raise UsageError(
            f"{name}: holds files of several kinds ({', '.join(kinds)}); name the ones you mean, as *{kinds[0]}"
        )
    return files


def _files_of_folder(folder: Path, split: str) -> list[Path]:
    visible = (file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
    files = sorted(file for file in visible if file.is_file() and extension(file) in READERS)
    if not files:
        raise UsageError(f"{folder}: the folder has no data files; known are {known_extensions()}")
    splits = sorted({_split_of(file, folder) for file in files} - {""})
    if split:
        chosen = [file for file in files if _split_of(file, folder, split) == split]
        if not chosen:
            there = f"; there are {', '.join(splits)}" if splits else ""
            raise UsageError(f"{folder}:{split}: no file of the folder is named {split} or {split}-...{there}")
        return chosen
    if set(splits) - {"train"} and len({_split_of(file, folder) for file in files}) > 1:
        raise UsageError(f"{folder}: holds files of several splits ({', '.join(splits)}); say which: {folder}:train")
    return files


def _split_of(file: Path, folder: Path, *more: str) -> str:
    """The split that a file's name, or that of a folder around it, begins with: train-00000-of-00002.parquet."""
    words = [re.split(r"[^A-Za-z]", part, maxsplit=1)[0] for part in reversed(file.relative_to(folder).parts)]
    whole = [part.split(".")[0] for part in reversed(file.relative_to(folder).parts)]
    return next((word for word in (*whole, *words) if word in (*SPLITS, *more)), "")


def known_extensions() -> str:
    """The extensions of files that can be read, for messages."""
    return ", ".join(READERS) + " (each also with .gz)"


# Hubs


def _is_hub_name(text: str) -> bool:
    """What is not here, looks like owner/name, and does not end as a file does."""
    found = HUB_NAME.fullmatch(text)
    if not found or Path(text).exists() or Path(found["name"]).exists():
        return False
    return extension(Path(found["name"])) not in READERS


def _hub(text: str) -> SourcePart:
    found = HUB_NAME.fullmatch(text)
    assert found is not None
    nowhere = f"{text}: no such file or folder"
    try:
        import datasets
        import huggingface_hub
    except ImportError as error:
        raise UsageError(f"{nowhere}; if it is a data set of the hub: pip install datasets") from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    offline = datasets.config.HF_HUB_OFFLINE or not _answers(datasets.config.HF_ENDPOINT)
    name, part, split = found["name"], found["part"], found["split"]
    if offline:  # else every file is tried for half a minute; what was downloaded before is still found
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        if part is None:
            loaded = datasets.load_dataset(name)
        elif part in datasets.get_dataset_config_names(name):
            loaded = datasets.load_dataset(name, part)
        else:
            loaded = datasets.load_dataset(name, data_dir=part)
    except Exception as error:  # whatever the network, the hub and a foreign data set can do wrong
        reason = "the hub cannot be reached, and its cache has none" if offline else f"from the hub: {_reason(error)}"
        raise UsageError(f"{nowhere}, and {reason}") from error
    return SourcePart(text, partial(_scan_table, text, _one_split(text, loaded, split)))


def _answers(address: str) -> bool:
    """Whether there is anybody at an address of the net."""
    if urllib.request.getproxies():  # cannot be judged from here
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
        raise UsageError(f"{text}: expected {MODELSCOPE}owner/name, with @part and :split if need be")
    try:
        from modelscope.msdatasets import MsDataset
    except ImportError as error:
        raise UsageError(f"{text}: needs the package modelscope: pip install 'modelscope[datasets]'") from error
    options = {"subset_name": found["part"]} if found["part"] else {}
    try:
        loaded = MsDataset.load(found["name"], split=found["split"] or "train", **options)
        table = loaded.to_hf_dataset() if isinstance(loaded, MsDataset) else loaded
    except Exception as error:  # as above
        raise UsageError(f"{text}: from ModelScope: {_reason(error)}") from error
    return SourcePart(text, partial(_scan_table, text, table))


@cache
def modelscope_model(text: str) -> str:
    """The folder with a model of ModelScope (`modelscope://owner/name`), downloaded if it is not here yet."""
    name = text.removeprefix(MODELSCOPE)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        raise UsageError(f"model.path: {text}: expected {MODELSCOPE}owner/name")
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise UsageError(f"model.path: {text}: needs the package modelscope: pip install modelscope") from error
    try:
        return str(snapshot_download(name))
    except Exception as error:  # as above
        raise UsageError(f"model.path: {text}: from ModelScope: {_reason(error)}") from error


def _one_split(text: str, loaded: Any, split: str | None) -> Any:
    """The split that is asked for, or train, or the only one."""
    there = list(loaded)
    wanted = split or ("train" if "train" in there or len(there) != 1 else there[0])
    if wanted not in there:
        plain = text.removesuffix(f":{split}")
        raise UsageError(f"{text}: the data set has no split {wanted}; say which: {plain}:{{{','.join(there)}}}")
    return loaded[wanted]


def _scan_table(text: str, table: Iterable[dict[str, Any]], _: ReadProgress | None) -> Records:
    number = 0
    for number, values in enumerate(table, start=1):
        yield Record(dict(values), f"{text}:row {number}")
    if not number:
        raise UsageError(f"{text}: the data set has no rows")


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
