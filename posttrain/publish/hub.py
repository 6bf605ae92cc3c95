"""Uploads an exported model to the Hugging Face hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from posttrain.core.errors import PosttrainError, UsageError
from posttrain.models import adapters
from posttrain.models.paths import HUB_NAME, hub_is_reachable, is_adapter

# Errors of files and connections; the base of the hub's error is that of all errors of its HTTP library.
UPLOAD_ERRORS = cast(tuple[type[Exception], ...], (OSError, *HfHubHTTPError.__bases__))


def check_push(name: str) -> None:
    """Raise UsageError, before anything is computed, if nothing could be uploaded."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(f"--push {name}: not a name of the hub (owner/model): {error}") from error
    if not get_token():
        raise UsageError("--push: there is no token of the hub: run `hf auth login`, or set HF_TOKEN")
    if not hub_is_reachable():
        raise UsageError("--push: the hub cannot be reached (HF_HUB_OFFLINE, or no network)")


def check_adapter_base(folder: Path) -> None:
    """Raise UsageError if adapters belong to a base model that is only on this machine."""
    if not is_adapter(folder):
        return
    base = str(json.loads((folder / adapters.CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path"))
    if not HUB_NAME.fullmatch(base) or "/" not in base or Path(base).exists():
        raise UsageError(
            f"--push: the adapters belong to {base}, which is not a name of the hub, so they could not be loaded "
            "elsewhere. Leave out --no_merge, or train from a model of the hub"
        )


def push(folder: Path, name: str, *, private: bool) -> str:
    """Create the repository if it does not exist, upload the folder in one commit, and return its address."""
    api = HfApi()
    try:
        address = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Exported by posttrain")
    except UPLOAD_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise PosttrainError(
            f"--push {name}: the upload failed: {reason}. {folder} is complete; push it again"
        ) from error
    return str(address)
