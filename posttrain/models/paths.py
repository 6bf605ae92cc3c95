"""Finds models: a folder, a run directory, a checkpoint, a name of the Hugging Face hub or of ModelScope, or `pico`."""

from __future__ import annotations

import hashlib
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import constants as hub
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from posttrain.checkpoints.checkpoint import resolve_model_folder
from posttrain.core.errors import UsageError
from posttrain.data.reading.sources import MODELSCOPE, modelscope_model
from posttrain.models import adapters
from posttrain.models.pico import pico_folder

# What libraries raise for files that do not fit together, such as a configuration whose values have another type.
LIBRARY_ERRORS = (
    *(OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, ImportError),
    *(SafetensorError, StrictDataclassError),
)
MAX_STACKED_ADAPTERS = 16
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def resolve_path(path: str) -> str:
    """Resolve model.path to a folder that transformers can read, or a hub name."""
    if not path:
        raise UsageError("no model: give --model.path a folder, a hub name, a run directory, or pico")
    if path == "pico":
        return str(pico_folder())
    if path.startswith(MODELSCOPE):
        return modelscope_model(path)
    folder = Path(path).expanduser()
    if not folder.exists():
        if HUB_NAME.fullmatch(path):
            return path
        raise UsageError(f"model.path: there is no folder {path}, and it is not a hub name (like owner/model)")
    if (folder / "checkpoints").is_dir():
        return str(resolve_model_folder(folder))
    for candidate in (folder, folder / "model"):  # the second: a checkpoint of a run
        if (candidate / "config.json").is_file() or is_adapter(candidate):
            return str(candidate)
    raise UsageError(f"model.path: no model in {path}: it has no config.json. {describe_contents(folder)}")


def resolve_base(source: str) -> str:
    """Return the path of the model that the adapters in a folder belong to."""
    below = [source]
    while is_adapter(below[-1]):
        below.append(resolve_path(adapters.base_model_of(Path(below[-1]))))
        if len(below) > MAX_STACKED_ADAPTERS:
            raise UsageError(
                f"{Path(source) / adapters.CONFIG}: base_model_name_or_path leads through more than "
                f"{MAX_STACKED_ADAPTERS} adapters, or back to itself; set it to the model that was adapted"
            )
    return below[1]


def base_model_path(source: str) -> str:
    """Return the path of the model itself: the source, or the base model of the adapters in it, even if stacked."""
    while is_adapter(source):
        source = resolve_base(source)
    return source


def describe_contents(folder: Path) -> str:
    """Describe in a sentence what the folder holds instead of a model."""
    if not folder.is_dir():
        return "It is a file; give the folder that holds the model."
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    if not names:
        return "It is empty."
    return f"It holds {', '.join(names[:8])}" + (f" and {len(names) - 8} more." if len(names) > 8 else ".")


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds LoRA adapters instead of a model."""
    return (Path(folder) / adapters.CONFIG).is_file()


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers; checked first because transformers would retry for half a minute per file."""
    if hub.is_offline_mode():
        return False
    if urllib.request.getproxies():  # a direct connection would prove nothing
        return True
    address = urlsplit(hub.ENDPOINT)
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def hub_options(source: str) -> dict[str, Any]:
    """Return options for every from_pretrained: no download without a network, and no remote code."""
    local = Path(source).is_dir() or not hub_is_reachable()
    return {"local_files_only": local, "trust_remote_code": False}


# While it constructs a model, transformers replaces a method of all models and sets torch's default dtype. Two threads
# that did so at the same time would leave the replacement behind: later models would silently lose tied weights.
CONSTRUCTION = threading.RLock()


@contextmanager
def loading_errors(source: str, option: str = "model.path") -> Iterator[None]:
    """Load something of a model in the block: turn a library's error into a UsageError of one line.

    One thread at a time: see CONSTRUCTION.
    """
    try:
        with CONSTRUCTION:
            yield
    except UsageError:
        raise
    except LIBRARY_ERRORS as error:
        lines = (str(error).strip() or type(error).__name__).splitlines()
        reason = " ".join(line.strip() for line in lines[: 2 if isinstance(error, StrictDataclassError) else 1])
        if "conversion of the weights" in reason:
            reason = "some tensors of its experts are missing or damaged; TRANSFORMERS_VERBOSITY=warning names them"
        if Path(source).is_dir():
            raise UsageError(f"{option}: {source} cannot be loaded: {reason}") from error
        if not hub_is_reachable():
            message = "is not a local folder and not in the hub's cache, and the hub cannot be reached. Give a folder."
            raise UsageError(f"{option}: {source} {message}") from error
        raise UsageError(
            f"{option}: {source} is not a local folder, and loading it from the hub failed: {reason}"
        ) from error


def model_fingerprint(path: str) -> str:
    """Return a hash of a model's files: names, sizes, content (of large files: 64 blocks); a hub name as it is."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*config.json")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}\n".encode())
        block = 2**20
        with file.open("rb") as stream:
            for start in range(0, size, max(block, size // 64)):
                stream.seek(start)
                digest.update(stream.read(block))
    return digest.hexdigest()
